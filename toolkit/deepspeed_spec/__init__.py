"""DeepSpeed's configuration as DeepSpeed reads it, in a job's section and in a user's file; needs no torch."""

from toolkit.deepspeed_spec.user_file import UserConfig, read_user_config

__all__ = ["UserConfig", "read_user_config"]
