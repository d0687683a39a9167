"""Concrete storage backends. The core finds them by the entry-point group `kvstore.backends`.

This folder is reached as `kvstore.backends` through a relative link; the bare name is not a package.
"""

if __name__ == "backends":
    raise ImportError("import kvstore.backends instead of backends: only `kvstore` is a package")
