"""The planner: which machines to rent for a job, and the fastest settings on them that fit and keep its numbers."""

# Seconds after which a search among clusters ends with what it has.
DEFAULT_SECONDS = 30.0
