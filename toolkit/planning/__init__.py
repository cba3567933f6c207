"""From a job to a plan, with every value explained and every rule checked."""
