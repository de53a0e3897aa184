"""Reading of a query's result from a database, by the rules for CSV files.

A file NAME.sql has the query, and comments before it that say where the database's address is. The address may hold a password:
it does not stand in this file, and messages and logs hide the password:

    -- url-env: HOSPITAL_DB        (or  -- url-file: /run/secrets/hospital-db)
    -- rows: 200000                (optional: the most rows)
    SELECT age, sex, ill FROM patients
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote

from attune.common.durable import read_small
from attune.common.errors import SettingError, ShardError, nearest
from attune.fedclient.data.arrays import read_text
from attune.fedclient.data.csv_file import TableContent, content_of_rows

if TYPE_CHECKING:
    from sqlalchemy import URL

MOST_ROWS = 1_000_000  # unless the file says another number
_MOST_BYTES = 1 << 16  # of the query, and of the file with the address
_KEY = re.compile(r"--\s*([a-z-]+)\s*:\s*(\S.*?)\s*")
_KEYS = ("url-env", "url-file", "rows")
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)  # in names of a URL's options
_IN_OPTION = re.compile(r"(?:pwd|password)\s*=\s*([^;]+)", re.IGNORECASE)  # of ODBC
_IN_ADDRESS = re.compile(r"://[^/:@]*:(.*)@|^[^/:@]+:([^/].*)@")  # before it is known whether it is a URL
_READING = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
# What makes a connection refuse to write, by dialect; others are rolled back.
_READ_ONLY = {"sqlite": "PRAGMA query_only = ON", "mysql": "SET TRANSACTION READ ONLY", "mariadb": "SET TRANSACTION READ ONLY"}


def read_sql(path: Path) -> TableContent:
    """Run the query in a file, and read its result.

    Raises:
        ShardError: The query fails, or has more rows than allowed.
        SettingError: The file does not say where the address is, it cannot be used, or SQLAlchemy is not installed.
    """
    query, given = _parse(path)
    try:
        import sqlalchemy
    except ImportError:
        raise SettingError(f"{path} is a query, which SQLAlchemy runs: pip install 'attune-fl[sql]'") from None
    address = _address(path, given)
    try:
        most = int(given.get("rows", MOST_ROWS))
    except ValueError:
        raise SettingError(f"{path}: rows is a number, not {given['rows'][:40]!r}") from None
    secrets = [part for match in _IN_ADDRESS.finditer(address) for part in match.groups() if part]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they quote the address
            url = sqlalchemy.make_url(address)
            secrets += _secrets_of(url)
            if "@" in (url.host or ""):
                raise ValueError("the password in the address has the character @: write it as %40")
            names, rows = _result(url, query, most + 1)
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, ValueError, TypeError) as error:
        hint = ". Write postgresql:// in place of postgres://" if address.startswith("postgres:") else ""
        raise ShardError(f"the query in {path} failed: {_without(secrets, error)}{hint}") from None
    if len(rows) > most:
        raise ShardError(f"the query in {path} has more than {most:,} rows: limit it, or allow more with `-- rows: NUMBER`")
    return content_of_rows(path, chain([names], rows))


def _result(url: URL, query: str, most: int) -> tuple[list[str], Sequence[Sequence[Any]]]:
    """Return the names and the first `most` rows of a query's result. The connection cannot write, or is rolled back."""
    import sqlalchemy

    dialect = url.get_backend_name()
    if dialect == "sqlite":
        _require_file(url)
    # Without parameters a driver leaves % in the query alone, where it would look for their places.
    options: dict[str, Any] = {"stream_results": True, "no_parameters": True}
    if dialect == "postgresql":
        options["postgresql_readonly"] = True
    engine = sqlalchemy.create_engine(url, hide_parameters=True, poolclass=sqlalchemy.pool.NullPool)
    with engine.connect().execution_options(**options) as connection:
        if command := _READ_ONLY.get(dialect):
            connection.exec_driver_sql(command)
        result = connection.exec_driver_sql(query)
        names, rows = list(result.keys()), result.fetchmany(most)
        connection.rollback()
    return names, rows


def _require_file(url: URL) -> None:
    """Refuse the address of a file that does not exist: SQLite would create an empty database there.

    Raises:
        FileNotFoundError: There is no such file.
    """
    file = unquote((url.database or "").removeprefix("file:"))
    if file and file != ":memory:" and url.query.get("mode") != "memory" and not Path(file).exists():
        raise FileNotFoundError("no such file of SQLite; a relative path begins at the folder in which the device was started")


def _parse(path: Path) -> tuple[str, dict[str, str]]:
    """Return the query, and what the comments before it say.

    Raises:
        ShardError: The file cannot be read.
        SettingError: A key is unknown, there is no address, or the query is none that only reads.
    """
    lines = read_text(path, _MOST_BYTES, strict=True).split("\n")
    given: dict[str, str] = {}
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("--")):
        line = lines.pop(0).strip()
        if match := _KEY.fullmatch(line):
            if match[1] not in _KEYS:
                raise SettingError(f"{path}: unknown key {match[1]!r}{nearest(match[1], _KEYS)}; known are {', '.join(_KEYS)}")
            given[match[1]] = match[2]
    query = "\n".join(lines).strip().removesuffix(";")
    if ("url-env" in given) == ("url-file" in given):
        raise SettingError(
            f"{path} must say where the address of the database is, in one line before the query: `-- url-env: VARIABLE` or "
            "`-- url-file: PATH`"
        )
    if not _READING.match(query):
        raise SettingError(f"{path} must hold one query that begins with SELECT or WITH")
    return query, given


def _address(path: Path, given: dict[str, str]) -> str:
    if "url-env" in given:
        address = os.environ.get(given["url-env"], "")
        if not address:
            raise SettingError(f"{path}: the environment variable {given['url-env'][:80]} holds no address of a database")
        return address
    file = path.parent / Path(given["url-file"]).expanduser()
    try:
        return read_small(file, _MOST_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot read {file}, the file with the address: {error.__class__.__name__}") from None


def _secrets_of(url: URL) -> list[str]:
    """Return the password of an address, and the values of its options that may hold one."""
    options = {key: value if isinstance(value, str) else " ".join(value) for key, value in url.query.items()}
    secrets = [str(url.password or ""), *(value for key, value in options.items() if _SECRET.search(key))]
    return [*secrets, *(part for value in options.values() for part in _IN_OPTION.findall(value))]


def _without(secrets: list[str], error: Exception) -> str:
    """Return the first line of an error with stars in place of the password, as it is and as URLs write it."""
    text = str(getattr(error, "orig", None) or error).strip().partition("\n")[0][:300]
    forms = {
        form for secret in secrets for form in (secret, quote(secret, safe=""), quote_plus(secret), unquote(secret)) if form
    }
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text or type(error).__name__
