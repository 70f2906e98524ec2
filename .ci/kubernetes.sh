#!/usr/bin/env bash
# Builds the Kubernetes that the tests talk to, from Debian 12's own source package, into a cache folder outside the
# repository, whose name it prints. No root is needed and nothing is installed: packages are only unpacked.
# In:  apt's configured Debian sources.   Out: FOLDER/bin (kube-apiserver, kube-controller-manager, kubelet,
# kube-scheduler) and FOLDER/root (etcd, containerd, runc, CNI plugins, bubblewrap, busybox as Debian ships them).
# A file appears when it is whole, so the first two programs can be used while the others are built; what is there is
# not made again. Ends with 1 and the last lines of FOLDER/log when something failed. About ten CPU minutes.
set -euo pipefail

release=1.20.2
source_version="1.20.5+really1.20.2-1.1+deb12u1"
packages=(golang-1.19-go golang-1.19-src patch xz-utils
    etcd-server bubblewrap containerd runc containernetworking-plugins busybox-static)
script=$(readlink -f "$0")
folder="${XDG_CACHE_HOME:-$HOME/.cache}/manege/kubernetes-$release-$(sha256sum "$script" | cut -c1-12)"
programs=(kube-apiserver kube-controller-manager kubelet kube-scheduler)

complete() {
    local program
    for program in "${programs[@]}"; do [[ -x $folder/bin/$program ]] || return 1; done
}

echo "$folder"
[[ ${1:-} != --where ]] || exit 0
complete && exit 0
mkdir -p "$folder/bin"
exec 9>"$folder/lock" && flock 9
complete && exit 0
exec 3>&2 >"$folder/log" 2>&1
trap 'code=$?; trap - EXIT; [[ $code == 0 ]] || { tail -n 20 "$folder/log"; echo "$script failed: $folder/log"; } >&3; exit $code' EXIT
set -x
work="$folder/work" root="$folder/root"
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/sources"

# Debian's package lists once more, then for sources too, in a place of our own: the machine's apt stays as it is.
apt=(apt-get -q -o "Dir::State::lists=$work/lists" -o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root
    -o Acquire::Retries=3)
"${apt[@]}" update || echo "a source of packages failed; whether Debian's did is seen below"
"${apt[@]}" indextargets --format '$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Identifier: Packages' | sort -u |
    awk '$1 == "Debian" { print "deb", $2, $3, $4; print "deb-src", $2, $3, $4 }' >"$work/sources.list"
[[ -s $work/sources.list ]] || { echo "apt is configured for no Debian packages"; exit 1; }
apt+=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null)
"${apt[@]}" update

if [[ ! -d $root ]]; then
    (cd "$work/archives" && "${apt[@]}" download "${packages[@]}")
    rm -rf "$root.part"
    for archive in "$work"/archives/*.deb; do dpkg-deb -x "$archive" "$root.part"; done
    mv "$root.part" "$root"
fi

# Kubernetes builds outside of module mode, in a GOPATH, as in its own time.
export GOROOT="$root/usr/lib/go-1.19" GOPATH="$work/go" GOCACHE="$work/cache" GO111MODULE=off CGO_ENABLED=0
export GOFLAGS="-p=2" GOTMPDIR="$work" PATH="$root/usr/lib/go-1.19/bin:$root/usr/bin:$PATH"
tree="$GOPATH/src/k8s.io/kubernetes" reflect=vendor/github.com/modern-go/reflect2
if [[ ! -d $tree ]]; then
    (cd "$work/sources" && "${apt[@]}" source --download-only "kubernetes=$source_version")
    rm -rf "$tree.part" && mkdir -p "$tree.part"
    tar -xf "$work"/sources/kubernetes_*.orig.tar.* -C "$tree.part" --strip-components=1
    tar -xf "$work"/sources/kubernetes_*.debian.tar.* -C "$tree.part"
    while read -r name; do
        [[ -z $name || $name == \#* ]] || patch -d "$tree.part" -p1 --forward --batch <"$tree.part/debian/patches/$name"
    done <"$tree.part/debian/patches/series"
    # Its reflect2 walks maps in a way that Go gave up in version 1.18: an API server would die of custom resources.
    sed -i -e 's/^func mapiterinit(.*/func mapiterinit(rtype, m unsafe.Pointer, it *hiter)/' \
        -e 's|// rest fields are ignored|rest [6]unsafe.Pointer; more [4]uintptr|' "$tree.part/$reflect/unsafe_link.go"
    sed -i -e 's/^\treturn &UnsafeMapIterator{$/\tit := new(hiter)\n\tmapiterinit(type2.rtype, *(*unsafe.Pointer)(obj), it)\n&/' \
        -e 's/hiter: *mapiterinit(.*/hiter: it,/' "$tree.part/$reflect/unsafe_map.go"
    mv "$tree.part" "$tree"
fi
cd "$tree"

# The API descriptions are the only generated code that the package leaves out.
if [[ ! -x $work/openapi-gen ]]; then
    nice go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
fi
describe() { # into which package, from which folders
    local into=$1 inputs
    shift
    [[ ! -s $into/zz_generated.openapi.go ]] || return 0
    inputs=$(printf 'k8s.io/kubernetes/%s,' "$@")
    nice "$work/openapi-gen" --logtostderr -i "${inputs%,}" -p "k8s.io/kubernetes/$into" -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations"
}
mapfile -t described < <(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin vendor/k8s.io/*/ | xargs -n1 dirname |
    sort -u | grep -vE 'vendor/k8s.io/(code-generator|sample-apiserver|sample-controller|kube-openapi|gengo)')
only() { printf '%s\n' "${described[@]}" | grep "$1"; }
meta=(vendor/k8s.io/apimachinery/pkg/{apis/meta/v1,runtime,version})
describe pkg/generated/openapi "${described[@]}"
describe staging/src/k8s.io/kube-aggregator/pkg/generated/openapi "${meta[@]}" $(only kube-aggregator)
describe staging/src/k8s.io/apiextensions-apiserver/pkg/generated/openapi "${meta[@]}" vendor/k8s.io/api/autoscaling/v1 \
    $(only vendor/k8s.io/apiextensions-apiserver/)

version="k8s.io/kubernetes/vendor/k8s.io/component-base/version"
IFS=. read -r major minor _ <<<"$release"
for pair in "kube-apiserver kube-controller-manager" "kubelet kube-scheduler"; do
    for program in $pair; do
        [[ ! -x $folder/bin/$program ]] || continue
        nice -n 10 go build -tags "providerless dockerless" -o "$work/$program" -ldflags "-s -w
            -X $version.gitVersion=v$release -X $version.gitMajor=$major -X $version.gitMinor=$minor" "./cmd/$program"
        mv "$work/$program" "$folder/bin/$program"
    done
done
cd "$folder"
chmod -R u+w "$work" && rm -rf "$work"
