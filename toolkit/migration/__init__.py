"""Files of other training tools as a job: what each key of theirs is here, and what is not carried."""
