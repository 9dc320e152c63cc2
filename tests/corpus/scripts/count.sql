SELECT count(*) AS total FROM generate_series(1, 3) AS numbers
