-- The ledger's tables, as in SQLite (fedserver.stores.migrations), with the audit log and the names of blobs.
CREATE TABLE meta (key TEXT COLLATE "C" PRIMARY KEY, value BYTEA NOT NULL);
CREATE TABLE devices (
    name TEXT COLLATE "C" PRIMARY KEY, public_key TEXT NOT NULL, enrolled_at DOUBLE PRECISION NOT NULL,
    founder INTEGER NOT NULL, revoked INTEGER NOT NULL DEFAULT 0, connected INTEGER NOT NULL DEFAULT 0,
    since DOUBLE PRECISION NOT NULL DEFAULT 0, samples BIGINT, contributed INTEGER NOT NULL DEFAULT 0,
    fetched INTEGER NOT NULL DEFAULT -1, progress DOUBLE PRECISION NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '',
    labels TEXT NOT NULL DEFAULT '', token TEXT NOT NULL DEFAULT '');
CREATE TABLE certificates (
    fingerprint TEXT COLLATE "C" PRIMARY KEY, name TEXT COLLATE "C" NOT NULL, role TEXT NOT NULL,
    not_after DOUBLE PRECISION NOT NULL, public_key TEXT NOT NULL DEFAULT '', issued_at DOUBLE PRECISION NOT NULL DEFAULT 0,
    used_at DOUBLE PRECISION, retires_at DOUBLE PRECISION);
CREATE TABLE tokens (
    rowid BIGINT GENERATED ALWAYS AS IDENTITY, fingerprint TEXT COLLATE "C" PRIMARY KEY, bootstrap_pem BYTEA NOT NULL,
    uses_left INTEGER NOT NULL, expires_at DOUBLE PRECISION NOT NULL, origin TEXT NOT NULL, used_up_at DOUBLE PRECISION,
    id TEXT NOT NULL DEFAULT '', uses INTEGER NOT NULL DEFAULT 1, made_at DOUBLE PRECISION NOT NULL DEFAULT 0,
    only_for TEXT NOT NULL DEFAULT '', withdrawn_at DOUBLE PRECISION);
CREATE TABLE refusals (
    who TEXT COLLATE "C" NOT NULL, kind TEXT COLLATE "C" NOT NULL, text TEXT NOT NULL, at DOUBLE PRECISION NOT NULL,
    count BIGINT NOT NULL, PRIMARY KEY (who, kind));
CREATE TABLE slots (
    part TEXT COLLATE "C" NOT NULL, key TEXT COLLATE "C" NOT NULL, file TEXT NOT NULL, digest TEXT NOT NULL,
    size BIGINT NOT NULL, PRIMARY KEY (part, key));
CREATE TABLE metrics (
    round INTEGER NOT NULL, work TEXT COLLATE "C" NOT NULL, client TEXT COLLATE "C" NOT NULL, row BYTEA NOT NULL,
    PRIMARY KEY (round, work, client));
-- One line of the audit log each, as bytes: each names the digest of the line before it.
CREATE TABLE audit (number BIGINT PRIMARY KEY, line BYTEA NOT NULL);
-- What a name holds, and the S3 object with the bytes. Several names may share an object; it goes with the last of them.
CREATE TABLE names (
    name TEXT COLLATE "C" PRIMARY KEY, digest TEXT COLLATE "C" NOT NULL, size BIGINT NOT NULL,
    object TEXT COLLATE "C" NOT NULL);
CREATE INDEX names_by_digest ON names (digest);
CREATE INDEX names_by_object ON names (object);

-- The last transaction that counts of each thread: who lost the answer to a commit looks here.
CREATE TABLE commits (who TEXT PRIMARY KEY, token TEXT NOT NULL);

-- A digest in each row, so that a row that was changed by hand is noticed: only fedserver's sessions write it.
CREATE FUNCTION row_digest_of(content JSONB) RETURNS BYTEA LANGUAGE SQL IMMUTABLE AS
    $$ SELECT sha256(convert_to((content - 'row_digest')::TEXT, 'UTF8')) $$;
CREATE FUNCTION write_row_digest() RETURNS TRIGGER LANGUAGE plpgsql AS $$
    BEGIN
        NEW.row_digest := row_digest_of(to_jsonb(NEW));
        RETURN NEW;
    END $$;
DO $$
    DECLARE
        changed TEXT;
    BEGIN
        FOREACH changed IN ARRAY
            ARRAY['meta', 'devices', 'certificates', 'tokens', 'refusals', 'slots', 'metrics', 'audit', 'names']
        LOOP
            EXECUTE format('ALTER TABLE %I ADD COLUMN row_digest BYTEA', changed);
            EXECUTE format(
                'CREATE TRIGGER row_digest BEFORE INSERT OR UPDATE ON %I FOR EACH ROW '
                'WHEN (current_setting(''attune.writer'', true) = ''on'') EXECUTE FUNCTION write_row_digest()', changed);
        END LOOP;
    END $$;
