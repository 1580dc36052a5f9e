-- The shop of the workload web: a catalogue, and what sessions order of it.
CREATE TABLE items (id integer PRIMARY KEY, name text NOT NULL, price integer NOT NULL,
    description text NOT NULL);
-- The price is what a client outside knows of an item.
INSERT INTO items SELECT id, 'item ' || id, 100 + id * 7919 % 10000,
        (SELECT string_agg(md5(id || '-' || part), ' ') FROM generate_series(1, 16) part)
    FROM generate_series(0, 19999) id;
CREATE TABLE sessions (id text PRIMARY KEY, orders integer NOT NULL, total bigint NOT NULL,
    chain text NOT NULL);
CREATE TABLE orders (session text NOT NULL, number integer NOT NULL, item integer NOT NULL,
    price integer NOT NULL, PRIMARY KEY (session, number));
CREATE VIEW catalogue AS
    SELECT md5(string_agg(md5(name || price || description), '' ORDER BY id)) AS digest FROM items;
CREATE TABLE noted AS SELECT digest FROM catalogue;
-- What does not agree, a line each.
CREATE VIEW wrong AS
    SELECT 'the catalogue is not what it was' AS what FROM catalogue, noted
        WHERE catalogue.digest <> noted.digest
    UNION ALL
    SELECT 'session ' || id || ' has ' || count(number) || ' orders, not ' || orders
        FROM sessions LEFT JOIN orders ON session = id GROUP BY id
        HAVING count(number) <> orders OR coalesce(max(number), -1) <> orders - 1
    UNION ALL
    SELECT 'session ' || id || ' paid ' || coalesce(sum(price), 0) || ', not ' || total
        FROM sessions LEFT JOIN orders ON session = id GROUP BY id
        HAVING coalesce(sum(price), 0) <> total
    UNION ALL
    SELECT 'an order of ' || items.name || ' has another price'
        FROM orders JOIN items ON items.id = item WHERE orders.price <> items.price;
