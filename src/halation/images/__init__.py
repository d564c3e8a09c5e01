"""Image files: PNG, video, labelled grids and plots."""
