"""What is known of DeepSpeed's configuration, without torch: its keys, and a user's own file or dict checked against them."""

from toolkit.deepspeed_spec.user_file import UserConfig, read_user_config

__all__ = ["UserConfig", "read_user_config"]
