//! Runs clients of a guest's shop, outside the guest: they send requests, check every answer, and
//! record the response times.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::measure::{AFTER, BEFORE};
use longhaul_lab::error::LabError;
use longhaul_lab::netns::Namespace;

/// The address of the shop, on the network of guests and clients.
pub const SHOP: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 78, 0, 2)),
    80,
);
const CLIENTS: u64 = 4;
/// The pause of a client between requests.
const THINK: Duration = Duration::from_millis(50);
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// How long an answer is waited for before the request is repeated on another connection.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// How long the clients check their sessions' orders at the end.
const LAST_LIMIT: Duration = Duration::from_secs(300);
const HEADER_BYTES_MAX: u64 = 16 << 10;
const BODY_BYTES_MAX: usize = 1 << 20;
/// One request in this many is an order, the others read the catalogue.
const ORDER_EVERY: u64 = 4;
const ITEMS: u64 = 20_000;
const ITEMS_ON_PAGE: u64 = 10;

/// Clients that send requests until they are stopped.
#[derive(Debug)]
pub struct Clients {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Seen>>,
}

/// The clients' observations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The time of each answer, and its response time; in the order of arrival.
    answers: Vec<(Instant, Duration)>,
    /// Wrong answers, and lost orders.
    pub wrong: u64,
    /// The first of them.
    pub first_wrong: Option<String>,
    /// Connections that broke, or on which nothing arrived for two minutes.
    broken: u64,
}

/// The service of a shop's clients around a move.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Responses {
    /// The number of clients.
    pub clients: u64,
    /// Answers from shortly before the move until shortly after it.
    pub answered: u64,
    /// Connections that broke.
    pub broken_connections: u64,
    /// The longest time without an answer to any client.
    pub longest_gap_ms: Option<f64>,
    /// The median response time before the move.
    pub before_ms: Option<f64>,
    /// The median response time during the move.
    pub during_ms: Option<f64>,
    /// Each second; the move begins with second 0.
    pub per_second: Vec<Second>,
}

/// A second of the clients' observations.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Second {
    /// Its number, counted from the beginning of the move.
    pub second: i64,
    /// Answers that arrived in it.
    pub answered: u64,
    /// Their median response time.
    pub median_ms: Option<f64>,
    /// The longest.
    pub longest_ms: Option<f64>,
}

impl Clients {
    /// Starts clients in a network.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(network: &Namespace) -> Result<Self, LabError> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for number in 0..CLIENTS {
            let (network, stop) = (Namespace::open(network.name())?, stop.clone());
            let thread = thread::Builder::new()
                .name("client".to_owned())
                .spawn(move || Client::new(number).run(&network, &stop))
                .map_err(|source| LabError::Io {
                    doing: "start a client".to_owned(),
                    source,
                })?;
            threads.push(thread);
        }
        Ok(Self { stop, threads })
    }

    /// Lets them check their orders, and returns their observations.
    pub fn finish(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Seen::default();
        for thread in std::mem::take(&mut self.threads) {
            match thread.join() {
                Ok(seen) => all.add(seen),
                Err(_) => all.note_wrong("a client ended".to_owned()),
            }
        }
        all.answers.sort_unstable();
        all
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        // The clients end without being waited for.
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.answers.extend(other.answers);
        self.wrong += other.wrong;
        self.broken += other.broken;
        if self.first_wrong.is_none() {
            self.first_wrong = other.first_wrong;
        }
    }

    fn note_wrong(&mut self, what: String) {
        self.wrong += 1;
        self.first_wrong.get_or_insert(what);
    }

    /// Returns the observations around a move.
    pub fn around(&self, began: Instant, ended: Instant) -> Responses {
        let from = began.checked_sub(BEFORE).unwrap_or(began);
        let (before, watched) = (self.between(from, began), self.between(from, ended + AFTER));
        let gaps = watched.windows(2).map(|pair| pair[1].0 - pair[0].0);
        Responses {
            clients: CLIENTS,
            answered: watched.len() as u64,
            broken_connections: self.broken,
            longest_gap_ms: gaps.max().map(ms),
            before_ms: median_ms(before),
            during_ms: median_ms(self.between(began, ended)),
            per_second: per_second(watched, began, from, ended + AFTER),
        }
    }

    fn between(&self, from: Instant, to: Instant) -> &[(Instant, Duration)] {
        let start = self.answers.partition_point(|(at, _)| *at < from);
        let end = self.answers.partition_point(|(at, _)| *at <= to);
        &self.answers[start..end.max(start)]
    }
}

/// Returns every whole second of the observed time, including those without an answer.
fn per_second(
    watched: &[(Instant, Duration)],
    began: Instant,
    from: Instant,
    to: Instant,
) -> Vec<Second> {
    let first = -((began - from).as_secs() as i64);
    let last = (to - began).as_secs() as i64;
    let of = |at: Instant| match at >= began {
        true => (at - began).as_secs() as i64,
        false => -((began - at).as_nanos().div_ceil(1_000_000_000) as i64),
    };
    let seconds = first..last;
    seconds
        .map(|second| {
            let of_it: Vec<_> = watched
                .iter()
                .filter(|(at, _)| of(*at) == second)
                .copied()
                .collect();
            Second {
                second,
                answered: of_it.len() as u64,
                median_ms: median_ms(&of_it),
                longest_ms: of_it.iter().map(|(_, took)| ms(*took)).reduce(f64::max),
            }
        })
        .collect()
}

fn median_ms(answers: &[(Instant, Duration)]) -> Option<f64> {
    crate::bench::document::median(answers.iter().map(|(_, took)| ms(*took)))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// One client, and its record of the session's state in the shop.
struct Client {
    session: String,
    orders: u64,
    chain: String,
    random: u64,
    connection: Option<BufReader<TcpStream>>,
    seen: Seen,
}

impl Client {
    fn new(number: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |time| time.as_nanos() as u64);
        let random = now ^ (number << 56) ^ u64::from(std::process::id()).rotate_left(32);
        Self {
            session: format!("{random:016x}"),
            orders: 0,
            chain: String::new(),
            random,
            connection: None,
            seen: Seen::default(),
        }
    }

    fn run(mut self, network: &Namespace, stop: &AtomicBool) -> Seen {
        while !stop.load(Ordering::Relaxed) {
            let again = match self.random().is_multiple_of(ORDER_EVERY) {
                true => self.order(network, stop),
                false => self.look(network, stop),
            };
            if again.is_some() {
                thread::sleep(THINK);
            }
        }
        if !self.seen.answers.is_empty() {
            self.look_at_session(network);
        }
        self.seen
    }

    /// Reads a page of the catalogue; returns nothing if it was stopped before.
    fn look(&mut self, network: &Namespace, stop: &AtomicBool) -> Option<()> {
        let page = self.random() % (ITEMS / ITEMS_ON_PAGE);
        let total: u64 = (page * ITEMS_ON_PAGE..(page + 1) * ITEMS_ON_PAGE)
            .map(price)
            .sum();
        let text = self.answer(network, &format!("/page/{page}"), || {
            stop.load(Ordering::Relaxed)
        })?;
        self.expect(&text, &format!("<h1>page {page} total {total}</h1>"));
        Some(())
    }

    /// Places an order. A request that is repeated because its answer was missing is executed once.
    fn order(&mut self, network: &Namespace, stop: &AtomicBool) -> Option<()> {
        let item = self.random() % ITEMS;
        let path = format!("/order/{}/{}/{item}", self.session, self.orders);
        let text = self.answer(network, &path, || stop.load(Ordering::Relaxed))?;
        self.orders += 1;
        self.chain = digest(format!("{} {item} {}", self.chain, price(item)).as_bytes());
        let expected = format!("<h1>orders {} chain {}</h1>", self.orders, self.chain);
        self.expect(&text, &expected);
        Some(())
    }

    /// Checks that the shop has all orders that it confirmed.
    fn look_at_session(&mut self, network: &Namespace) {
        let began = Instant::now();
        let path = format!("/session/{}", self.session);
        let text = self.answer(network, &path, || began.elapsed() > LAST_LIMIT);
        let Some(text) = text else {
            let what = "the shop does not say what was ordered".to_owned();
            return self.seen.note_wrong(what);
        };
        // One order may have been executed without its answer.
        let expected = format!("<h1>orders {} chain {}</h1>", self.orders, self.chain);
        let more = format!("<h1>orders {} chain ", self.orders + 1);
        if !text.starts_with(&more) {
            self.expect(&text, &expected);
        }
    }

    fn expect(&mut self, text: &str, beginning: &str) {
        if !text.starts_with(beginning) {
            let first = text.lines().next().unwrap_or_default();
            self.seen
                .note_wrong(format!("the shop answered {first}, not {beginning}"));
        }
    }

    /// Sends a request until there is a complete answer; returns nothing when it is to give up.
    fn answer(
        &mut self,
        network: &Namespace,
        path: &str,
        gives_up: impl Fn() -> bool,
    ) -> Option<String> {
        let asked = Instant::now();
        while !gives_up() {
            match self.ask(network, path) {
                Ok((200, body)) => {
                    let now = Instant::now();
                    self.seen.answers.push((now, now - asked));
                    return self.whole(body);
                }
                Ok((status, body)) => {
                    // A starting shop has no application yet.
                    if self.orders > 0 {
                        let body = String::from_utf8_lossy(&body);
                        self.seen.note_wrong(format!("{path}: {status}: {body}"));
                    }
                }
                Err(_) => self.seen.broken += u64::from(self.connection.take().is_some()),
            }
            thread::sleep(RECONNECT_EVERY);
        }
        None
    }

    /// Returns the text of an answer whose digest is correct.
    fn whole(&mut self, body: Vec<u8>) -> Option<String> {
        let text = String::from_utf8_lossy(&body);
        let cut = text.trim_end().rfind("<!-- ").unwrap_or(0);
        let (content, end) = text.split_at(cut);
        if end.trim_end() != format!("<!-- {} -->", digest(content.as_bytes())) {
            let what = format!("an answer of {} bytes has another digest", body.len());
            self.seen.note_wrong(what);
        }
        Some(content.to_owned())
    }

    fn ask(&mut self, network: &Namespace, path: &str) -> io::Result<(u32, Vec<u8>)> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(network)?,
        };
        let connection = self.connection.insert(connection);
        let request = format!("GET {path} HTTP/1.1\r\nHost: shop\r\n\r\n");
        connection.get_mut().write_all(request.as_bytes())?;
        read_answer(connection)
    }

    /// Returns a xorshift generator.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 8
    }
}

fn connect(network: &Namespace) -> io::Result<BufReader<TcpStream>> {
    let stream = network
        .enter(|| TcpStream::connect_timeout(&SHOP, CONNECT_LIMIT))
        .map_err(io::Error::other)??;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    Ok(BufReader::new(stream))
}

/// Reads an answer with a length: its status and its content.
fn read_answer(connection: &mut impl BufRead) -> io::Result<(u32, Vec<u8>)> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut header = connection.by_ref().take(HEADER_BYTES_MAX);
    let mut line = String::new();
    header.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| invalid("no status"))?;
    let mut length = None;
    loop {
        line.clear();
        if header.read_line(&mut line)? == 0 {
            return Err(invalid("no end of the header"));
        }
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok();
        }
    }
    let length = length.filter(|length| *length <= BODY_BYTES_MAX);
    let mut body = vec![0; length.ok_or_else(|| invalid("no length, or too long"))?];
    connection.read_exact(&mut body)?;
    Ok((status, body))
}

/// Returns the price of an item, as generated in the guest's catalogue.
fn price(item: u64) -> u64 {
    100 + item * 7919 % 10_000
}

/// Returns the 64-bit FNV-1a, as the shop computes it.
fn digest(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_to_its_length_and_no_further() {
        let mut bytes: &[u8] =
            b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 404";
        assert_eq!(read_answer(&mut bytes).unwrap(), (200, b"hello".to_vec()));
        assert_eq!(bytes, b"HTTP/1.1 404");
        for wrong in [
            "",
            "HTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        ] {
            assert!(read_answer(&mut wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_answer_that_is_not_what_it_must_be_is_counted() {
        let mut client = Client::new(1);
        let text = "<h1>orders 1 chain x</h1>\n";
        let whole = format!("{text}<!-- {} -->\n", digest(text.as_bytes()));
        assert_eq!(
            client.whole(whole.clone().into_bytes()).as_deref(),
            Some(text)
        );
        client.expect(text, "<h1>orders 1 chain x</h1>");
        assert_eq!(client.seen.wrong, 0);
        client.expect(text, "<h1>orders 2 chain x</h1>");
        assert_eq!(client.seen.wrong, 1);
        client.whole(whole.replace("chain x", "chain y").into_bytes());
        client.whole(b"nothing".to_vec());
        assert_eq!(client.seen.wrong, 3);
        // The values are those of FNV's authors.
        assert_eq!(digest(b""), "cbf29ce484222325");
        assert_eq!(digest(b"foobar"), "85944171f73967e8");
    }

    #[test]
    fn seconds_without_an_answer_are_shown() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let answers = [500, 4_000, 5_200, 5_900, 8_100, 9_500];
        let seen = Seen {
            answers: answers
                .map(|ms| (at(ms), Duration::from_millis(ms / 100)))
                .to_vec(),
            ..Seen::default()
        };
        let responses = seen.around(at(5_000), at(8_000));
        assert_eq!(responses.longest_gap_ms, Some(2200.0));
        assert_eq!(
            (responses.before_ms, responses.during_ms),
            (Some(40.0), Some(55.5))
        );
        let counts: Vec<(i64, u64)> = responses
            .per_second
            .iter()
            .map(|second| (second.second, second.answered))
            .collect();
        let expected = [
            (-3, 0),
            (-2, 0),
            (-1, 1),
            (0, 2),
            (1, 0),
            (2, 0),
            (3, 1),
            (4, 1),
        ];
        assert_eq!(counts, expected);
        assert_eq!(responses.per_second[3].longest_ms, Some(59.0));
        assert_eq!(responses.per_second[4].median_ms, None);
    }
}
