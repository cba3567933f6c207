"""Pipeline parallelism: any Hugging Face decoder cut by its layers, whose parts run on ranks of their own."""
