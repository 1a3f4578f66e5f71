"""Where each point of a loaded model is, and the proof that it is there."""
