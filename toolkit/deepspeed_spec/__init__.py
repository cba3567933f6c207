"""What is known of DeepSpeed's configuration, without torch: its keys as it reads them, in a job's section and in a user's file."""

from toolkit.deepspeed_spec.user_file import UserConfig, read_user_config

__all__ = ["UserConfig", "read_user_config"]
