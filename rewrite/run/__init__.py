"""Running a Program: at other sizes, token by token, in pieces, with inner values read, with operations counted."""
