"""A private world for a worker: its own users, files, network, IPC and process numbers (tier B).

Made once when a worker starts: a user namespace needs no rights where the system allows it, and network and mount
namespaces are too slow to be made for every test. The process numbers are made anew for every test.
"""

from __future__ import annotations

import contextlib
import os

from magicrl.verifiers.code import kernel

SCRATCH = "/tmp"
_SCRATCH_OPTIONS = "size=64m,nr_inodes=2000,mode=0700"
_LOCKED = kernel.MS_NOSUID | kernel.MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INNER_ID = 1000
_STAGE = "/tmp"


def enter() -> None:
    """New namespaces for this process; its next child is the first of its own process numbers.

    Raises:
        OSError: the system does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWPID
    )
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{_INNER_ID} {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def private_tree(readable: list[str]) -> bool:
    """Replace the file tree by one that holds ``readable`` (read-only), devices and an empty scratch folder.

    Returns whether /proc could be mounted (the process numbers' own; a container may forbid it).

    Raises:
        OSError: the system does not allow it.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _STAGE, "tmpfs", _LOCKED, "size=1m,mode=0755")
    root = os.path.join(_STAGE, "root")
    os.mkdir(root)
    kernel.mount("tmpfs", root, "tmpfs", _LOCKED, "size=1m,mode=0755")
    for path in readable:
        _bind(path, root + path)
    for device in _DEVICES:
        _bind("/dev/" + device, f"{root}/dev/{device}", read_only=False)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for folder in ("proc", "old"):
        os.mkdir(f"{root}/{folder}")
    os.makedirs(root + SCRATCH, exist_ok=True)
    kernel.pivot_root(root, root + "/old")
    os.chdir("/")
    has_proc = True
    try:
        kernel.mount("proc", "/proc", "proc", _LOCKED | kernel.MS_NOEXEC)
    except OSError:
        has_proc = False
    kernel.umount("/old", kernel.MNT_DETACH)
    os.rmdir("/old")
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_BIND | _LOCKED)
    fresh_scratch()
    return has_proc


def _bind(source: str, target: str, *, read_only: bool = True) -> None:
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if read_only:
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY
        # flags that the outer world set are locked and must be repeated
        kernel.mount("none", target, None, flags | _inherited(target))


def _inherited(path: str) -> int:
    present = os.statvfs(path).f_flag
    kept = 0
    for have, flag in (
        (os.ST_NOSUID, kernel.MS_NOSUID),
        (os.ST_NODEV, kernel.MS_NODEV),
        (os.ST_NOEXEC, kernel.MS_NOEXEC),
        (os.ST_NOATIME, 1024),
        (os.ST_NODIRATIME, 2048),
        (os.ST_RELATIME, 1 << 21),
    ):
        if present & have:
            kept |= flag
    return kept


def fresh_scratch() -> None:
    """An empty scratch folder over the old one."""
    with contextlib.suppress(OSError):
        kernel.umount(SCRATCH, kernel.MNT_DETACH)
    kernel.mount("tmpfs", SCRATCH, "tmpfs", _LOCKED, _SCRATCH_OPTIONS)
