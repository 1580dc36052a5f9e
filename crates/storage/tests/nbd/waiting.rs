//! Tests requests that wait for another party, and those behind them.

use crate::client::*;
use crate::common::{Moody, Served, wait_until};
use longhaul_storage::disk::{Disk, Extent, Zeros};
use longhaul_storage::nbd::others_go_on;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A disk that stores each write at once, and returns when it is released.
#[derive(Debug)]
struct Held {
    disk: Arc<Moody>,
    let_go: Mutex<bool>,
    changed: Condvar,
}

impl Held {
    fn new(size_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            disk: Moody::new(size_bytes),
            let_go: Mutex::new(false),
            changed: Condvar::new(),
        })
    }

    fn let_go(&self) {
        *self.let_go.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Disk for Held {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read(offset, buffer)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.disk.write(offset, bytes)?;
        others_go_on(|| {
            let waits = |let_go: &mut bool| !*let_go;
            let let_go = self.let_go.lock().unwrap();
            drop(self.changed.wait_while(let_go, waits).unwrap());
        });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()> {
        self.disk.zero(range, zeros)
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.discard(range)
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        self.disk.extents(range, count_max)
    }
}

fn send_writes(client: &mut Client, count: u64, length: usize) {
    for place in 0..count {
        let header = request(WRITE, 0, place * length as u64, length as u32);
        client.send(&[header, vec![place as u8 + 1; length]].concat());
    }
}

#[test]
fn those_behind_one_that_waits_go_on() {
    let held = Held::new(1 << 20);
    let served = Served::new(held.clone());
    let mut client = Client::ready(&served, false);
    send_writes(&mut client, 3, 512);
    let read = client.read(0, 2048).unwrap();
    assert_eq!(
        read.chunk_by(|a, b| a == b).count(),
        4,
        "all three are there"
    );
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(client.read(512, 1).unwrap(), [2]);
    held.let_go();
    (0..3).for_each(|_| assert_eq!(client.error(), 0));
    // It proceeds like any other.
    assert_eq!(client.write(0, 0, &[9; 512]), 0);
    assert_eq!(client.read(0, 1).unwrap(), [9]);
    assert!(served.notices().is_empty());
}

#[test]
fn not_too_many_wait_and_all_are_answered() {
    // As many as may wait, and one that stops those behind it.
    for (count, length, go_on) in [(40, 512, 17), (8, 8 << 20, 5)] {
        let held = Held::new(64 << 20);
        let served = Served::new(held.clone());
        let mut client = Client::ready(&served, false);
        let mut sender = Client {
            stream: client.stream.try_clone().unwrap(),
        };
        let sending = std::thread::spawn(move || send_writes(&mut sender, count, length));
        wait_until(|| held.disk.get(|mood| mood.writes) == go_on);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(held.disk.get(|mood| mood.writes), go_on);
        held.let_go();
        (0..count).for_each(|_| assert_eq!(client.error(), 0));
        sending.join().unwrap();
    }
}

#[test]
fn a_connection_that_breaks_the_protocol_ends_for_all_of_its_threads() {
    let (served, _path) = Served::image(1 << 20);
    for round in 0..300 {
        let mut client = Client::ready(&served, false);
        client.send(&[0xee; 28]);
        assert!(client.is_cut_off(), "round {round}");
    }
    served.wait_for_connections(0);
}

#[test]
fn a_connection_that_is_cut_ends_when_nothing_waits_any_more() {
    let held = Held::new(1 << 20);
    let served = Served::new(held.clone());
    let mut client = Client::ready(&served, false);
    send_writes(&mut client, 2, 512);
    wait_until(|| held.disk.get(|mood| mood.writes) == 2);
    drop(client);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(served.server.connections(), 1, "a write is still under way");
    held.let_go();
    served.wait_for_connections(0);
}
