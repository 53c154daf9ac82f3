"""Seven tasks side by side with DP-SGD: its rivals, what their tuning costs."""
