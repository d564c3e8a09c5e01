"""`RankSampler` for the trainers of other libraries; each module imports only its library."""
