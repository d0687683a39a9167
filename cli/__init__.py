"""The `kvstore` command: what operators see.

This folder is reached as `kvstore.cli` through a relative link; the bare name is not a package.
"""

if __name__ == "cli":
    raise ImportError("import kvstore.cli instead of cli: only `kvstore` is a package")
