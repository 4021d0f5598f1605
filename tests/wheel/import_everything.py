"""Import of every module of the rooms that work without extras."""

import importlib
import pkgutil

ROOMS = ("draftsmith.modules", "draftsmith.export")

if __name__ == "__main__":
    names = [info.name for room in ROOMS
             for info in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}.")]
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules of {', '.join(ROOMS)} import without extras")
