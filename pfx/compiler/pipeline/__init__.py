"""A scan over layers whose leading dim is split over a mesh axis, inside a scan over microbatches: a pipeline."""
