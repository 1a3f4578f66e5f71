"""The backend that runs the Hugging Face module tree itself."""
