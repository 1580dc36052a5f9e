<?php
// The application of the workload web. Every answer ends with a digest of all that stands before
// it; an order carries a chain of digests over all of its session's orders, which the client knows.
//   /page/NUMBER                       a page of the catalogue
//   /order/SESSION/NUMBER/ITEM         an order; asked again, it is answered again and not done
//   /session/SESSION                   what the session has ordered

const ITEMS_ON_PAGE = 10;

function answer(int $status, string $text): never
{
    $text .= '<!-- ' . hash('fnv1a64', $text) . " -->\n";
    http_response_code($status);
    header('Content-Type: text/html');
    header('Content-Length: ' . strlen($text));
    echo $text;
    exit;
}

function ask(string $query, array $values): array
{
    global $database;
    $result = pg_query_params($database, $query, $values);
    if ($result === false) {
        answer(500, "<h1>the database refused</h1>\n");
    }
    return pg_fetch_all($result);
}

function page(int $number): never
{
    $items = ask('SELECT * FROM items WHERE id >= $1 ORDER BY id LIMIT $2',
        [$number * ITEMS_ON_PAGE, ITEMS_ON_PAGE]);
    $total = array_sum(array_column($items, 'price'));
    $text = "<h1>page $number total $total</h1>\n<ul>\n";
    foreach ($items as $item) {
        $text .= "<li><b>{$item['name']}</b> {$item['price']} {$item['description']}</li>\n";
    }
    answer(200, "$text</ul>\n");
}

function order(string $session, int $number, int $item): never
{
    ask('BEGIN', []);
    ask("INSERT INTO sessions VALUES (\$1, 0, 0, '') ON CONFLICT DO NOTHING", [$session]);
    [$price] = array_column(ask('SELECT price FROM items WHERE id = $1', [$item]), 'price');
    [$known] = ask('SELECT orders, chain FROM sessions WHERE id = $1 FOR UPDATE', [$session]);
    $chain = $known['chain'];
    if ((int) $known['orders'] === $number) {
        $chain = hash('fnv1a64', "$chain $item $price");
        ask('INSERT INTO orders VALUES ($1, $2, $3, $4)', [$session, $number, $item, $price]);
        ask('UPDATE sessions SET orders = orders + 1, total = total + $2, chain = $3 WHERE id = $1',
            [$session, $price, $chain]);
        $known['orders'] = $number + 1;
    }
    ask('COMMIT', []);
    answer(200, "<h1>orders {$known['orders']} chain $chain</h1>\n");
}

function session(string $session): never
{
    $known = ask('SELECT orders, chain FROM sessions WHERE id = $1', [$session]);
    [$known] = $known ?: [['orders' => 0, 'chain' => '']];
    answer(200, "<h1>orders {$known['orders']} chain {$known['chain']}</h1>\n");
}

$database = pg_pconnect('host=/run/postgresql dbname=shop user=postgres');
if ($database === false) {
    answer(500, "<h1>the database is not there</h1>\n");
}
$words = explode('/', trim($_SERVER['REQUEST_URI'], '/'));
match ([$words[0], count($words)]) {
    ['page', 2] => page((int) $words[1]),
    ['order', 4] => order($words[1], (int) $words[2], (int) $words[3]),
    ['session', 2] => session($words[1]),
    default => answer(404, "<h1>not here</h1>\n"),
};
