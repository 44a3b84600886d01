"""Files and folders, local or remote, that appear complete or not at all.

storage.py        a folder or a location of an object store, whichever a path names
local.py, remote.py    the two kinds
checked_file.py   files with checksums
atomic_file.py, atomic_folder.py    what appears at once, when it is complete
document.py       a small file that is replaced whole
"""
