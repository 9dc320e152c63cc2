"""The pool of workers as the control plane sees it: commands out, their ends back."""
