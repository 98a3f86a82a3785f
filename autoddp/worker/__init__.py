"""Floor 5. What runs inside the user's process: a guest that touches one class and leaves nothing behind."""
