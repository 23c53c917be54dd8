"""Which file systems may stop answering."""

import pytest

from inference.slides._mounts import file_system_of, is_network

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:40 / /mnt/slides rw,relatime shared:20 master:3 - nfs4 filer:/export/slides rw,vers=4.2
41 40 8:1 / /mnt/slides/scratch rw - xfs /dev/sda1 rw
42 27 0:42 / /mnt/pathology\040archive\011old rw - cifs //filer/archive\040old rw,vers=3.1.1
43 27 0:43 / /mnt/s3 rw,nosuid - fuse.s3fs s3fs rw,user_id=0
44 27 0:44 / /mnt/back\134slash rw - 9p share rw
45 27 0:45 / /mnt/twice rw - ext4 /dev/sdb rw
46 45 0:46 / /mnt/twice rw - lustre 10.0.0.1@tcp:/fs rw
47 27 0:47 / /mnt/einhängen rw - ceph 10.0.0.2:/ rw
48 27 0:48 / /mnt/usb rw - fuseblk /dev/sdc1 rw
damaged line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/data/a.svs", "ext4", False),
        ("/", "ext4", False),
        ("/mnt/slides/2024/a b.svs", "nfs4", True),
        ("/mnt/slides", "nfs4", True),
        ("/mnt/slides-of-old/a.svs", "ext4", False),
        ("/mnt/slides/scratch/a.svs", "xfs", False),
        ("/mnt/pathology archive\told/a.svs", "cifs", True),
        ("/mnt/pathology/a.svs", "ext4", False),
        ("/mnt/s3/a.svs", "fuse.s3fs", True),
        ("/mnt/back\\slash/a.svs", "9p", True),
        ("/mnt/twice/a.svs", "lustre", True),
        ("/mnt/einhängen/a.svs", "ceph", True),
        ("/mnt/usb/a.svs", "fuseblk", False),
    ],
)
def test_a_file_lies_on_the_file_system_of_the_longest_mount_point(path: str, kind: str, network: bool) -> None:
    assert file_system_of(path, MOUNTS) == kind
    assert is_network(kind) is network


@pytest.mark.parametrize(("kind", "network"), [("fuse.fuse-overlayfs", False), ("overlay", False), ("tmpfs", False),
                                               ("smb3", True), ("beegfs", True), (None, False)])  # fmt: skip
def test_what_container_engines_mount_is_local(kind: str | None, network: bool) -> None:
    assert is_network(kind) is network


def test_no_table_of_mounts_tells_nothing() -> None:
    assert file_system_of("/data/a.svs", "") is None
