//! Tests what clients of a guest see of its move: connections go on, and what was sent to the
//! guest while it was stopped arrives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, Stage, tiny};
use longhaul_lab::guest::{Chipset, network};
use longhaul_lab::netns::Namespace;
use longhaul_lab::process::wait_until;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const LINK: &str = "200mbit,20ms";
const GUEST: &str = "10.78.0.2";
const ECHO: u16 = 7;
const DOWNLOAD: u16 = 19;
/// Between two datagrams.
const EVERY: Duration = Duration::from_millis(5);
/// A client gives up a connection on which nothing comes for this time.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn clients_of_a_guest_notice_only_its_downtime() {
    let networks: toml::Table = toml::from_str(&format!(
        "[networks.{}]\nbridge = \"{}\"",
        network::NETWORK,
        network::BRIDGE
    ))
    .unwrap();
    let qemus = ["10.0", "10.0"];
    let Some(mut stage) = Stage::with("clients of a guest", qemus, LINK, &networks) else {
        return;
    };
    stage.lab.add_clients().unwrap();
    for host in 0..2 {
        stage.product.agent_mut(host).unwrap().see_interfaces();
    }
    stage.restart(&[0, 1]);
    let mut guest = tiny("served", Chipset::Q35, "10.0", 1);
    guest.serves_clients = true;
    let mut guest = stage.boot(&guest, 500);
    let clients = stage.lab.clients().unwrap();

    // Bulk fills the room for frames of a stopped guest: single datagrams are counted without it.
    let others: [Loop; 2] = [datagrams, bulk];
    for (from, more) in [(0, &[][..]), (1, &["--early-release"][..])] {
        let all: [Loop; 3] = [download, session, others[from]];
        let all = all.map(|run| Client::start(clients, run));
        for client in &all {
            assert!(wait_until(LIMIT, || client.answers() > 10), "not served");
        }
        let finished = guest.migrate(&stage, from, more).finish(LIMIT).unwrap();
        guest.assert_moved(&stage, from, &finished);
        for client in &all {
            let before = client.answers();
            assert!(wait_until(LIMIT, || client.answers() > before + 10));
        }
        let seen = all.map(|client| client.finish().unwrap());
        let downtime = finished.report.unwrap().downtime;
        eprintln!("{downtime:?}: {seen:?}");
        for Seen {
            longest_gap,
            lost,
            twice,
        } in seen
        {
            // Without the frames that are passed on, all datagrams of the gap would be lost.
            let of_gap = longest_gap.as_millis() / EVERY.as_millis();
            assert!(
                u128::from(lost) <= of_gap / 4 && twice == 0,
                "{lost} of {of_gap} datagrams lost, {twice} came twice"
            );
        }
    }
    guest.end(&stage);
}

/// What a client saw.
#[derive(Debug, Default)]
struct Seen {
    longest_gap: Duration,
    lost: u64,
    twice: u64,
}

struct Client {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    thread: JoinHandle<io::Result<Seen>>,
}

/// A client's loop, until it is told to stop; it counts its answers.
type Loop = fn(&AtomicBool, &AtomicU64) -> io::Result<Seen>;

impl Client {
    fn start(network: &Namespace, run: Loop) -> Self {
        let (stop, answers) = (
            Arc::new(AtomicBool::new(false)),
            Arc::<AtomicU64>::default(),
        );
        let network = Namespace::open(network.name()).unwrap();
        let (stopped, counted) = (stop.clone(), answers.clone());
        let run = move || network.enter(|| run(&stopped, &counted)).unwrap();
        let thread = thread::spawn(run);
        Self {
            stop,
            answers,
            thread,
        }
    }

    fn answers(&self) -> u64 {
        assert!(!self.thread.is_finished(), "a client broke off");
        self.answers.load(Ordering::Relaxed)
    }

    fn finish(self) -> io::Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn connect(port: u16) -> io::Result<TcpStream> {
    let address: SocketAddr = format!("{GUEST}:{port}").parse().unwrap();
    let began = Instant::now();
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) if began.elapsed() > LIMIT => return Err(error),
            Err(_) => thread::sleep(EVERY),
        }
    }
}

/// Reads numbers in sequence.
fn download(stop: &AtomicBool, answers: &AtomicU64) -> io::Result<Seen> {
    let mut stream = connect(DOWNLOAD)?;
    let (mut buffer, mut place) = (vec![0; 64 << 10], 0u64);
    let (mut seen, mut last) = (Seen::default(), Instant::now());
    while !stop.load(Ordering::Relaxed) {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for byte in &buffer[..length] {
            let expected = (place / 8).to_le_bytes()[(place % 8) as usize];
            if *byte != expected {
                return Err(io::Error::other(format!("byte {place} is wrong")));
            }
            place += 1;
        }
        seen.longest_gap = seen.longest_gap.max(last.elapsed());
        last = Instant::now();
        answers.fetch_add(1, Ordering::Relaxed);
    }
    Ok(seen)
}

/// Types a word and waits for its echo, again and again.
fn session(stop: &AtomicBool, answers: &AtomicU64) -> io::Result<Seen> {
    let mut stream = connect(ECHO)?;
    let mut seen = Seen::default();
    let mut number = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let asked = Instant::now();
        stream.write_all(&number.to_le_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if answer != number.to_le_bytes() {
            return Err(io::Error::other(format!("word {number} is wrong")));
        }
        number += 1;
        seen.longest_gap = seen.longest_gap.max(asked.elapsed());
        answers.fetch_add(1, Ordering::Relaxed);
        thread::sleep(EVERY);
    }
    Ok(seen)
}

/// Sends numbers in sequence, in long pieces, and reads them back.
fn bulk(stop: &AtomicBool, answers: &AtomicU64) -> io::Result<Seen> {
    let mut stream = connect(ECHO)?;
    let mut sending = stream.try_clone()?;
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut next = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let piece: Vec<u8> = (next..next + 4096).flat_map(u64::to_le_bytes).collect();
                sending.write_all(&piece)?;
                next += 4096;
            }
            sending.shutdown(std::net::Shutdown::Write)
        });
        let (mut seen, mut last, mut next) = (Seen::default(), Instant::now(), 0u64);
        let mut answer = [0; 8];
        let mut reader = io::BufReader::with_capacity(64 << 10, &mut stream);
        loop {
            match reader.read_exact(&mut answer) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
            if answer != next.to_le_bytes() {
                return Err(io::Error::other(format!("number {next} is wrong")));
            }
            next += 1;
            if next % 4096 == 0 {
                seen.longest_gap = seen.longest_gap.max(last.elapsed());
                last = Instant::now();
                answers.fetch_add(1, Ordering::Relaxed);
            }
        }
        sender.join().unwrap()?;
        Ok(seen)
    })
}

/// Sends numbered datagrams at a steady pace, and counts which come back.
fn datagrams(stop: &AtomicBool, answers: &AtomicU64) -> io::Result<Seen> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect((GUEST, ECHO))?;
    socket.set_nonblocking(true)?;
    let mut came: Vec<u32> = Vec::new();
    let (mut seen, mut last) = (Seen::default(), Instant::now());
    let mut ended: Option<Instant> = None;
    loop {
        // Those that are on their way may come back for a while.
        let all = came.iter().all(|count| *count > 0);
        if ended.is_some_and(|at| all || at.elapsed() > Duration::from_secs(5)) {
            break;
        }
        if ended.is_none() {
            // The guest may not listen yet, and refuse.
            let _ = socket.send(&(came.len() as u64).to_le_bytes());
            came.push(0);
            ended = stop.load(Ordering::Relaxed).then(Instant::now);
        }
        let mut answer = [0; 8];
        while let Ok(length) = socket.recv(&mut answer) {
            let number = u64::from_le_bytes(answer) as usize;
            if length == 8 && number < came.len() {
                came[number] += 1;
                seen.longest_gap = seen.longest_gap.max(last.elapsed());
                last = Instant::now();
                answers.fetch_add(1, Ordering::Relaxed);
            }
        }
        thread::sleep(EVERY);
    }
    // Before the first answer the guest may not have listened.
    let first = came.iter().position(|count| *count > 0).unwrap_or(0);
    seen.lost = came[first..].iter().filter(|count| **count == 0).count() as u64;
    seen.twice = came.iter().filter(|count| **count > 1).count() as u64;
    Ok(seen)
}
