"""Scripts as a new user writes them, each as short as the README would show it."""
