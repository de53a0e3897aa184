#!/bin/sh
# Builds both images with buildah, without a container engine and without a registry, and runs two devices for two rounds in them.
# `make images` calls it; deploy/README.md says what it needs. BUILD_OPTIONS: more options for `buildah build`.
set -eu
cd "$(dirname "$0")/.."
SUITE=${SUITE:-bookworm}  # its Python is that of the pinned base
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
PORT=${PORT:-50951}
export BUILDAH_ISOLATION=chroot
BASE=localhost/attune-base:$SUITE
WORK=$(mktemp -d)
SERVER= CONTAINERS=

end() {
    # The container's own process: buildah passes no signal on.
    [ -z "$SERVER" ] || kill "$(sed 's/.*"pid":\([0-9]*\).*/\1/' "$WORK/server/server/server.json")" 2>/dev/null || true
    wait
    [ -z "$CONTAINERS" ] || buildah rm $CONTAINERS >/dev/null
    rm -rf "$WORK"
}
trap end EXIT

if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
    mmdebstrap --variant=minbase --include=ca-certificates,python-is-python3,python3-venv "$SUITE" "$WORK/base.tar"
    root=$(buildah from scratch)
    buildah add -q "$root" "$WORK/base.tar" / >/dev/null
    buildah commit -q --rm "$root" "$BASE" >/dev/null
    rm "$WORK/base.tar"
fi
for kind in server client; do
    # shellcheck disable=SC2086 - several words
    buildah build --format docker --layers ${BUILD_OPTIONS:-} --build-arg "BASE=$BASE" --build-arg "TORCH_INDEX=$TORCH_INDEX" \
        --file "deploy/Dockerfile.$kind" --tag "attune-$kind" .
done

# Containers of this isolation share the host's network. Each has a state folder of its own, as in compose.yaml.
container() { # NAME IMAGE: a container, and the folder that is mounted at its home
    mkdir "$WORK/$1"
    chown 10001:10001 "$WORK/$1"
    buildah from --name "attune-images-$1" --pull-never --volume "$WORK/$1:/var/lib/attune" --volume "$WORK/shards:/shards" "$2" >/dev/null
    CONTAINERS="$CONTAINERS attune-images-$1"
}
inside() { # NAME COMMAND...
    name=$1
    shift
    buildah run "attune-images-$name" -- "$@"
}

chmod 755 "$WORK"
mkdir -m 777 "$WORK/shards"
touch "$WORK/server.log"
container server attune-server
container device0 attune-client
container device1 attune-client
inside server python -c '
import numpy as np
for n in range(2):
    random = np.random.default_rng(n)
    y = np.arange(60) % 3
    x = random.normal(size=(60, 6)) + y[:, None]
    np.savez(f"/shards/shard{n}.npz", train_x=x[:45], train_y=y[:45], test_x=x[45:], test_y=y[45:])
'
inside server fedserver --port "$PORT" --rounds 2 --exit-when-done --join-uses 2 --dashboard off \
    --set server.advertise="localhost:$PORT" >"$WORK/server.log" 2>&1 &
SERVER=$!
until token=$(sed -n "s/^on a device: fedclient join --server localhost:$PORT --token //p" "$WORK/server.log") && [ -n "$token" ]; do
    kill -0 "$SERVER" 2>/dev/null || { cat "$WORK/server.log"; exit 1; }
    sleep 1
done
inside device0 fedclient --data /shards/shard0.npz --server "localhost:$PORT" --name device0 --token "$token" &
first=$!
inside device1 fedclient --data /shards/shard1.npz --server "localhost:$PORT" --name device1 --token "$token"
wait "$first"
wait "$SERVER"
SERVER=
inside server fedserver status
for device in device0 device1; do
    inside "$device" fedclient evaluate --data "/shards/shard${device#device}.npz"
done
inside server fedserver status --json | grep -q '"state":"done"'
echo "both images are built, and two devices finished two rounds in them"
