-- Tells the client at once that a transaction was committed: pgbench's own log is buffered.
CREATE FUNCTION committed() RETURNS void LANGUAGE plpgsql AS
    'BEGIN RAISE NOTICE ''committed''; END';
