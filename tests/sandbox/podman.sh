#!/usr/bin/env bash
# Prepares podman for the slow tests: the packages where apt has them, and a base image that needs no registry.
#
#   tests/sandbox/podman.sh
#
# Everything is kept in ~/.cache/verifiers-podman (VERIFIERS_PODMAN names another place): cache it in CI. Where podman
# cannot be had this says "not available" and ends with 0; the tests then skip with the same reason.
set -euo pipefail

place=${VERIFIERS_PODMAN:-$HOME/.cache/verifiers-podman}
image=localhost/verifiers-test/python:3.11-slim
mkdir -p "$place"
not_available() { echo "podman: not available: $*" | tee "$place/not-available"; exit 0; }

[ "$(id -u)" = 0 ] || not_available "this script prepares it for root"
for tool in podman catatonit runc debootstrap; do
  command -v $tool > /dev/null && continue
  command -v apt-get > /dev/null || not_available "there is neither $tool nor apt-get"
  apt-get update -qq && apt-get install -qq --yes --no-install-recommends podman buildah catatonit runc debootstrap > /dev/null \
    || not_available "apt-get cannot install podman"
  break
done

# crun refuses hybrid cgroups, and a machine without systemd has no cgroups of its own to give; the limits are below
# those that a container of CI may have itself
cat > "$place/containers.conf" <<'CONF'
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=2000:2000"]
CONF
# the name by which sandboxes ask for Python is this image in the tests alone
cat > "$place/registries.conf" <<'CONF'
[aliases]
"python" = "localhost/verifiers-test/python"
CONF
export CONTAINERS_CONF=$place/containers.conf CONTAINERS_REGISTRIES_CONF=$place/registries.conf

if ! podman image exists "$image"; then
  archive=$place/debian.tar
  if ! [ -f "$archive" ]; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3-minimal,libpython3-stdlib bookworm "$root" > "$place/debootstrap.log" \
      || not_available "debootstrap failed, see $place/debootstrap.log"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -cf "$archive.part" .
    mv "$archive.part" "$archive"
  fi
  podman import --quiet "$archive" "$image" > /dev/null || not_available "podman import failed"
fi
podman run --rm --network=none "$image" python3 -c 'print("podman: works")' || not_available "podman cannot run a container"
rm -f "$place/not-available"
