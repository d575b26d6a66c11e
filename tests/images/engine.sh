#!/usr/bin/env bash
# A Docker engine and a base image for the tests, on a machine that may have neither, without pulling anything.
#   tests/images/engine.sh start FOLDER   start an engine of its own (as root, from Debian's docker.io); prints DOCKER_HOST
#   tests/images/engine.sh base NAME      make the base image NAME with mmdebstrap where it is missing
#   tests/images/engine.sh stop FOLDER    end that engine
set -euo pipefail

case $1 in
start)
    mkdir -p "$2"
    dockerd --default-ulimit nofile=1024:1024 --iptables=false --ip6tables=false --bridge=none \
        --data-root "$2/data" --exec-root "$2/exec" --pidfile "$2/pid" --host "unix://$2/socket" \
        > "$2/log" 2>&1 < /dev/null &
    for _ in $(seq 60); do
        if DOCKER_HOST=unix://$2/socket docker version > /dev/null 2>&1; then
            echo "unix://$2/socket"
            exit 0
        fi
        sleep 1
    done
    tail -5 "$2/log" >&2
    exit 1
    ;;
base)
    docker image inspect "$2" > /dev/null 2>&1 && exit 0
    mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,ca-certificates bookworm - | docker import - "$2"
    ;;
stop)
    kill "$(cat "$2/pid")"
    ;;
esac
