"""Mode collective: the workers hold the rows, and exchange them among themselves."""
