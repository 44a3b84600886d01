"""Files and folders, local or remote, that appear complete or not at all."""
