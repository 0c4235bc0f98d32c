# Installs packages in the root of an image and runs the script of its recipe. `build` runs this in
# namespaces of its own, which end the mounts and what the script started.
#
#   install.sh ROOT OVERLAY DOWNLOADS SCRIPT [PACKAGE...]
#
# OVERLAY has the mount options of a layer; empty: ROOT is the complete tree.
set -e
root=$1 overlay=$2 downloads=$3 script=$4
shift 4
if [ -n "$overlay" ]; then
  mount -t overlay overlay -o "$overlay" "$root"
fi
for place in dev etc proc run tmp usr/sbin var/cache/apt/archives var/lib/apt/lists; do
  mkdir -p "$root/$place"
done
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$downloads/archives/partial" "$downloads/lists/partial"
mount --bind "$downloads/archives" "$root/var/cache/apt/archives"
mount --bind "$downloads/lists" "$root/var/lib/apt/lists"
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
ln -s /proc/self/fd "$root/dev/fd"
rm -f "$root/etc/resolv.conf"
cat /etc/resolv.conf > "$root/etc/resolv.conf"
trust=
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
  cp /etc/ssl/certs/ca-certificates.crt "$root/run/machine-ca.crt"
  trust=Acquire::https::CaInfo=/run/machine-ca.crt
  for variable in SSL_CERT_FILE CURL_CA_BUNDLE PIP_CERT NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO; do
    export "$variable=/run/machine-ca.crt"
  done
fi
apt() {
  chroot "$root" apt-get -q -o Acquire::Languages=none -o APT::Sandbox::User=root \
    ${trust:+-o "$trust"} -o Dpkg::Use-Pty=false \
    -o Dpkg::Options::=--path-exclude=/usr/share/man/* \
    -o Dpkg::Options::=--path-exclude=/usr/share/info/* \
    -o Dpkg::Options::=--path-exclude=/usr/share/doc/* \
    -o Dpkg::Options::=--path-exclude=/usr/share/locale/*/LC_MESSAGES/* "$@"
}
# Packages must not start their services.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"
if [ $# -gt 0 ]; then
  apt update
  apt install -y --no-install-recommends "$@"
fi
chroot "$root" /bin/sh -e -c "$script"
rm "$root/usr/sbin/policy-rc.d"
cd "$root"
rm -rf var/log/*.log var/log/apt/* var/cache/apt/*.bin var/tmp/*
rm -rf usr/share/doc/* usr/share/man/* usr/share/info/*
rm -f etc/resolv.conf
: > etc/resolv.conf
: > etc/machine-id
