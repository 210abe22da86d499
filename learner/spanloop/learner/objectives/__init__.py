"""Policy-gradient objectives by the names that people know them by. Pure functions of tensors; ``registry`` puts them together."""
