"""A lock on a file, for one writer at a time; it ends with the process that took it, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import weakref
from pathlib import Path

from ..text import printable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_MOST_READ = 200


class HeldError(Exception):
    """Another process holds the lock; the message names it."""


class FileLock:
    """A lock that this process holds until `release`, until nobody refers to it any more, or until the process ends.

    Get one from `take`. Processes that are forked off do not hold it.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._finalizer = weakref.finalize(self, _give_back, path, file)
        self._file = file

    @property
    def held(self) -> bool:
        """False after `release`, and once somebody else in this process took the lock."""
        return self._finalizer.alive

    def release(self) -> None:
        """Gives the lock back and removes its file. May be called any number of times."""
        self._finalizer()

    def forget(self) -> None:
        """Closes the file without giving the lock back, which the parent of a forked process goes on to hold."""
        if self._finalizer.detach():
            os.close(self._file)


# By device and inode: a folder may have several names.
_TAKEN: weakref.WeakValueDictionary[tuple[int, int], FileLock] = weakref.WeakValueDictionary()


def take(path: Path) -> FileLock:
    """Takes the lock whose file is `path`, away from whoever has it in this process.

    An owner in this process may have failed without a word, and be kept alive by its traceback; it sees by `held` that
    the lock is gone.

    Raises:
        HeldError: another process has it.
        OSError: the file cannot be written, or its file system knows no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, "This system has no fcntl")
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            status = os.fstat(file)
            key = (status.st_dev, status.st_ino)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "It is not a regular file", str(path))
            if not _locked(file):
                earlier = _TAKEN.get(key)
                if earlier is None:
                    owner = printable(os.read(file, _MOST_READ).decode(errors="replace").strip())
                    raise HeldError(owner or "another process")
                earlier.release()
            elif _is_at(path, key):
                lock = FileLock(path, file)
                _TAKEN[key] = lock
                with contextlib.suppress(OSError):  # a full disk: the lock holds, but does not say whose it is
                    os.ftruncate(file, 0)
                    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(errors="replace"))
                return lock
        except BaseException:
            os.close(file)
            raise
        # Its owner removed the file before it gave the lock back; a new one is there, or will be.
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, key: tuple[int, int]) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == key


def _give_back(path: Path, file: int) -> None:
    # In this order: whoever opens the file from now on finds another one, or locks this one and sees that it is gone.
    with contextlib.suppress(OSError):
        status = os.fstat(file)
        if _is_at(path, (status.st_dev, status.st_ino)):
            path.unlink()
    os.close(file)


def _forget_all() -> None:
    for lock in list(_TAKEN.values()):
        lock.forget()
    _TAKEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
