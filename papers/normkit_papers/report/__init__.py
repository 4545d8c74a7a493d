"""Result files, and the tables, figures and pages made from them."""
