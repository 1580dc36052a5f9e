//! Tests the export that tracks writes, as processes that are killed while a client writes.

use crate::client::Client;
use crate::front::{Killed, Setting, signal};
use longhaul_storage::front::tracking::{
    CHUNK_BYTES, Changed, Checkpoint, CheckpointError, Held, Request, begin, ship,
};
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

const CHUNKS: u64 = 64;

struct Tracked {
    setting: Setting,
    supervisor: Killed,
    before: Vec<u8>,
    /// Chunks of writes that were sent, answered or not.
    sent: BTreeSet<u64>,
}

impl Tracked {
    fn new(server: &str) -> Self {
        let setting = Setting::new();
        let image: PathBuf = setting.image.clone();
        let before: Vec<u8> = (0..CHUNKS * CHUNK_BYTES).map(|n| (n % 253) as u8).collect();
        std::fs::write(&image, &before).unwrap();
        begin(&setting.folder, before.len() as u64).unwrap();
        let supervisor = setting.supervisor(server);
        Self {
            setting,
            supervisor,
            before,
            sent: BTreeSet::new(),
        }
    }

    fn write(&mut self, client: &mut Client, chunk: u64) {
        self.sent.insert(chunk);
        assert_eq!(client.write(0, chunk * CHUNK_BYTES + 77, b"written"), 0);
    }

    fn recorded(&self) -> BTreeSet<u64> {
        let changed = Changed::of(&self.setting.folder).unwrap();
        let chunks = changed
            .ranges
            .iter()
            .flat_map(|range| range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES));
        chunks.collect()
    }

    /// Compares the record with the image.
    fn judge(&self) {
        let recorded = self.recorded();
        let after = std::fs::read(&self.setting.image).unwrap();
        for chunk in 0..CHUNKS {
            let bytes = (chunk * CHUNK_BYTES) as usize..((chunk + 1) * CHUNK_BYTES) as usize;
            if self.before[bytes.clone()] != after[bytes] {
                assert!(recorded.contains(&chunk), "chunk {chunk} has changed");
            }
        }
        let mut more = recorded.clone();
        more.retain(|chunk| !self.is_expected(*chunk, &recorded));
        assert!(more.is_empty(), "{more:?} were never written");
    }

    /// Returns whether a chunk was written, or recorded ahead of a write: a run of chunks has at
    /// most as many behind it.
    fn is_expected(&self, chunk: u64, recorded: &BTreeSet<u64>) -> bool {
        let Some(written) = self.sent.range(..=chunk).next_back() else {
            return false;
        };
        let before = (0..*written).rev();
        let run = before.take_while(|it| recorded.contains(it)).count() as u64;
        chunk - written <= run && (*written..chunk).all(|it| recorded.contains(&it))
    }
}

#[test]
fn writes_are_recorded_without_an_owner_whichever_process_is_killed() {
    let mut tracked = Tracked::new("track");
    let mut server = tracked.setting.server_after(None);
    for round in 0..8 {
        let mut client = tracked.setting.client();
        for n in 0..4 {
            tracked.write(&mut client, (round * 5 + n * 3) % CHUNKS);
        }
        tracked.judge();
        // Requests that are not answered: the server dies in the middle of them.
        for n in 0..3 {
            let chunk = (round * 7 + n * 11) % CHUNKS;
            tracked.sent.insert(chunk);
            client.request(crate::client::WRITE, 0, chunk * CHUNK_BYTES, 4);
            client.send(b"lost");
        }
        match round % 3 {
            2 => {
                tracked.supervisor.0.kill().unwrap();
                tracked.supervisor.0.wait().unwrap();
                tracked.supervisor = tracked.setting.supervisor("track");
            }
            _ => signal(server, Signal::SIGKILL),
        }
        server = tracked.setting.server_after(Some(server));
        tracked.judge();
    }
    assert!(!tracked.setting.folder.fell_back());
    assert!(tracked.recorded().len() < CHUNKS as usize);
    tracked.setting.stop(&mut tracked.supervisor);
    tracked.judge();
}

#[test]
fn once_the_fallback_has_answered_everything_has_changed() {
    let mut tracked = Tracked::new("server stuck");
    assert_eq!(tracked.recorded(), BTreeSet::new());
    for _ in 0..2 {
        let mut client = tracked.setting.client();
        client.request(crate::client::WRITE, 0, 0, 4);
        client.send(b"more");
        assert!(client.is_cut_off(), "it was answered");
    }
    let mut client = tracked.setting.client();
    tracked.write(&mut client, 9);
    assert_eq!(tracked.recorded().len() as u64, CHUNKS);
    tracked.setting.stop(&mut tracked.supervisor);
}

/// Copies what has changed, in steps; something happens after the first half.
fn copy(
    checkpoint: &mut Checkpoint,
    replica: &mut [u8],
    happens: &mut dyn FnMut(),
) -> Result<(), CheckpointError> {
    for chunk in 0..CHUNKS {
        let bytes = chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES;
        let mut content = vec![0; CHUNK_BYTES as usize];
        let changed = checkpoint.has_changed(&bytes);
        if changed {
            checkpoint.read(bytes.start, &mut content)?;
        }
        checkpoint.copied(bytes.end)?;
        if changed {
            replica[bytes.start as usize..bytes.end as usize].copy_from_slice(&content);
        }
        if chunk == CHUNKS / 2 {
            happens();
        }
    }
    Ok(())
}

#[test]
fn checkpoints_lack_nothing_whenever_the_server_is_killed() {
    let mut tracked = Tracked::new("track");
    let mut replica = tracked.before.clone();
    let mut server = tracked.setting.server_after(None);
    let (mut from, mut copied, mut lost) = (0, 0, 0);
    for round in 0..9 {
        let mut client = tracked.setting.client();
        for n in 0..6 {
            tracked.write(&mut client, (round * 5 + n * 3) % CHUNKS);
        }
        let request = Request {
            from: Some(from),
            hold: Duration::from_secs(2),
            log_bytes_max: u64::MAX,
        };
        let held = Held::prepare(&tracked.setting.folder, &request).unwrap();
        let mut checkpoint = held.commit().unwrap();
        let at_checkpoint = std::fs::read(&tracked.setting.image).unwrap();
        let kills = round % 3 == 1;
        let done = copy(&mut checkpoint, &mut replica, &mut || {
            if kills {
                signal(server, Signal::SIGKILL);
                server = tracked.setting.server_after(Some(server));
                client = tracked.setting.client();
            }
            for n in 0..6 {
                let chunk = (round * 11 + n * 7) % CHUNKS;
                assert_eq!(
                    client.write(0, chunk * CHUNK_BYTES + 9, &[round as u8; 5]),
                    0
                );
            }
        });
        match done {
            Ok(()) => {
                assert!(!kills && replica == at_checkpoint, "round {round}");
                let closed = checkpoint.round();
                drop(checkpoint);
                ship(&tracked.setting.folder, closed).unwrap();
                (from, copied) = (closed + 1, copied + 1);
            }
            // What was copied of it may be of any moment: the next one has all of that again.
            Err(_) => {
                assert!(kills);
                lost += 1;
            }
        }
    }
    assert_eq!((copied, lost), (6, 3));
    tracked.setting.stop(&mut tracked.supervisor);
}
