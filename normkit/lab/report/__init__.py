"""Result files, and what people see of them: table, pictures, page. Reads those files and nothing else."""
