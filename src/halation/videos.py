"""MP4 files: frames to H.264 bytes that play everywhere, with the spec in the file's comment."""
