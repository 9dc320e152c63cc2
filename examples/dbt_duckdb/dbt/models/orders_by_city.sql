SELECT city, count(*) AS orders, sum(CAST(amount AS INTEGER)) AS amount
FROM {{ source('main', 'raw_orders') }}
GROUP BY city
