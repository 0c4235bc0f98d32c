"""Images built on this machine from Debian packages.

A recipe (`recipe`, `base.toml`, `minimal.toml`) says what an image has. `build` turns it into a
root file system, or into one layer on top of another image. `node_release` fetches Node.js.
"""
