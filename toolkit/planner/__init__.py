"""The planner: which machines to rent for a job, and the fastest settings on them that fit and keep its numbers."""
