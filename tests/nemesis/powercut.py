"""A power cut: rebuilds a folder as a disk would show it after the machine lost power.

`shim.c` noted every change below the folder. Replayed here, a change counts as on disk when what it needs was synced:
the bytes of a file by a sync of that file, the names in a folder by a sync of that folder.

    strict    whatever was not synced is gone: bytes and names alike (the least that POSIX promises)
    partial   names up to a random instant are on disk, and of each file's bytes that were not synced a random number of
              writes, in order (what a journaling file system mostly does)

SQLite's files are treated like all others, since its writes come through the same calls. Its `-shm` is left out: it
never outlives a crash. Not played: writes that reach the disk in another order within one file, and torn sectors.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Node:
    """A file or a folder, as the program sees it and as the disk has it."""

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)
    disk_data: bytes = b""
    disk_names: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes (offset, bytes) and truncations (size, None) since the last sync."""

    def sync(self) -> None:
        """Everything of this node is on disk; of a folder its names, not what they name."""
        self.disk_data, self.disk_names = bytes(self.data), dict(self.names)
        self.pending = []

    def change(self, at: int, data: bytes | None) -> None:
        """Write at an offset, or truncate to a size."""
        _apply(self.data, at, data)
        self.pending.append((at, data))


def _apply(target: bytearray, at: int, data: bytes | None) -> None:
    size = at if data is None else max(len(target), at + len(data))
    if size > len(target):
        target.extend(bytes(size - len(target)))
    if data is None:
        del target[at:]
    else:
        target[at : at + len(data)] = data


class Disk:
    """What a folder held when it was looked at first, and everything that was noted since.

    Example: `disk = Disk(folder); …; disk.replay(journal); disk.cut(folder, random.Random(3), strict=True)`.
    """

    def __init__(self, folder: Path) -> None:
        self._inodes: dict[int, Node] = {}
        self._root = self._look(folder)

    def _look(self, path: Path) -> Node:
        node = Node(is_folder=path.is_dir())
        if node.is_folder:
            inner = [one for one in path.iterdir() if not one.name.endswith(("-shm", ".lock"))]
            node.names = {one.name: self._look(one) for one in inner}
        else:
            node.data = bytearray(path.read_bytes())
        node.sync()
        self._inodes[path.stat().st_ino] = node
        return node

    def replay(self, journal: Path, rng: random.Random | None = None) -> None:
        """Take in what was noted. With `rng`, folders count as synced up to a random place behind the last sync."""
        changes = list(_changes(journal.read_bytes())) if journal.exists() else []
        synced = max((n for n, change in enumerate(changes) if change[0] == "S"), default=-1)
        instant = rng.randint(synced + 1, len(changes)) if rng else -1
        folders: list[Node] = []
        for number, change in enumerate(changes):
            folders = self._one(change)
            if number < instant:
                for folder in folders:
                    folder.disk_names = dict(folder.names)

    def cut(self, folder: Path, rng: random.Random, *, strict: bool) -> None:
        """Make `folder` what the disk holds, and remember that as the beginning of the next life."""
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._restore(self._root, folder, rng, strict)
        self._inodes = {}
        self._root = self._look(folder)

    def _restore(self, node: Node, path: Path, rng: random.Random, strict: bool) -> None:
        if node.is_folder:
            path.mkdir(exist_ok=True)
            for name, inner in sorted(node.disk_names.items()):
                self._restore(inner, path / name, rng, strict)
            return
        data = bytearray(node.disk_data)
        reached = 0 if strict else rng.randint(0, len(node.pending))
        for at, written in node.pending[:reached]:
            _apply(data, at, written)
        path.write_bytes(data)

    def _one(self, change: list[str | bytes]) -> list[Node]:
        """Play one change; returns the folders whose names changed."""
        op, *rest = change
        match op, rest:
            case (("C" | "D"), [str(path), str(inode)]):
                node = self._inodes[int(inode)] = Node(is_folder=op == "D")
                folder, name = self._place(path)
                folder.names[name] = node
                return [folder]
            case "W", [str(inode), str(at), _, bytes(data)]:
                self._inodes[int(inode)].change(int(at), data)
            case "T", [str(inode), str(size)]:
                self._inodes[int(inode)].change(int(size), None)
            case "S", [str(inode)]:
                self._inodes[int(inode)].sync()
            case "R", [str(old), str(new)]:
                (source, before), (target, after) = self._place(old), self._place(new)
                target.names[after] = source.names.pop(before)
                return [source, target]
            case "L", [str(old), str(new)]:
                (source, before), (target, after) = self._place(old), self._place(new)
                target.names[after] = source.names[before]
                return [target]
            case "U", [str(path), _]:
                folder, name = self._place(path)
                folder.names.pop(name, None)
                return [folder]
            case _:
                raise ValueError(f"unknown change {change!r}")
        return []

    def _place(self, path: str) -> tuple[Node, str]:
        folder = self._root
        *parents, name = path.split("/")
        for parent in parents:
            folder = folder.names[parent]
        return folder, name


def _changes(text: bytes) -> list[list[str | bytes]]:
    changes: list[list[str | bytes]] = []
    at = 0
    # A line that is cut off by a kill was noted before its operation took effect for anybody else.
    while (end := text.find(b"\n", at)) >= 0:
        fields: list[str | bytes] = list(os.fsdecode(text[at:end]).split("\t"))
        at = end + 1
        if fields[0] == "W":
            size = int(fields[3])
            fields.append(text[at : at + size])
            at += size
        changes.append(fields)
    return changes
