//! Tests guests that run before all of their memory has arrived, between two real QEMUs on one
//! machine, from a source that knows nothing of post-copy.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod payload;

use common::{emulators, machines};
use longhaul_hypervisor::memory::{
    Arriving, ArrivingEvent, Frozen, GuestMemory, Incoming, Missing, PageServer, Prelude, Request,
    page_server,
};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_qemu_stream::Page;
use payload::source::{LIMIT, Source, assert_equal};
use payload::{Payload, Qemu, Spec, main_block};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages given at once.
const BATCH: usize = 64;
/// The time limit for a guest to ask for a page, on any slow machine.
const FAULT_LIMIT: Duration = Duration::from_secs(120);
const SOCKET: &str = "LONGHAUL_TEST_PAGE_SERVER";

/// Not a test, but the process that the other tests run.
#[test]
fn the_process_of_a_page_server() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        page_server::run(Path::new(&socket)).unwrap();
    }
}

/// A page server in a process of its own.
struct ServerProcess {
    child: Child,
    socket: PathBuf,
}

impl ServerProcess {
    /// Starts it, and connects to it.
    async fn start(socket: PathBuf) -> (Self, PageServer) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_process_of_a_page_server", "--nocapture"]);
        command.env(SOCKET, &socket).env_remove("RUST_TEST_THREADS");
        let child = command.spawn().unwrap();
        let began = Instant::now();
        loop {
            match PageServer::connect(&socket).await {
                Ok(connected) => return (Self { child, socket }, connected),
                Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until it has ended by itself.
    fn ended(&mut self) {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < LIMIT, "the page server does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!self.socket.exists(), "its socket is left over");
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest that is stopped at the source, and loaded at the destination without some pages.
struct Moved {
    source: Arc<GuestMemory>,
    destination: Qemu,
    memory: GuestMemory,
    server: ServerProcess,
    arriving: Arriving,
    /// The pages that the destination does not have, by the place of their block at the source.
    missing: BTreeSet<(usize, u64)>,
    /// The place in the stream's list of each block of the source.
    places: Vec<usize>,
    /// The list of RAM blocks, and the pages that were missing when the guest was loaded.
    prelude: Prelude,
    discards: Vec<Missing>,
    faults: usize,
    began: Instant,
}

/// Returns ranges of pages, from pages in ascending order.
fn ranges(pages: impl Iterator<Item = u64>) -> Vec<BlockRange> {
    let mut ranges: Vec<BlockRange> = Vec::new();
    for page in pages {
        match ranges.last_mut().filter(|range| range.end() == page) {
            Some(range) => range.count += 1,
            None => ranges.push(BlockRange::new(page, 1)),
        }
    }
    ranges
}

impl Moved {
    /// Moves a guest after one pass: what is pending then is missing, and so are `more` pages of
    /// its main memory.
    async fn start(source: &Qemu, to: &Spec, more: Range<u64>) -> Self {
        let mut moving = Source::start(source).await;
        let destination = Qemu::waiting(to).await;
        let memory = destination.memory().await;
        let path = destination.folder.path().join("incoming");
        let prelude = &moving.prelude;
        let incoming = Incoming::start_for_postcopy(&destination.qmp, &path, &prelude.bytes).await;
        let incoming = incoming.unwrap();
        moving.held().await;
        let main = main_block(&moving.memory);
        let later: BTreeSet<(usize, u64)> = more.map(|page| (main, page)).collect();
        moving.pending.pages.retain(|page| !later.contains(page));
        moving.pending.send(&moving.memory, &memory);
        let Frozen { tail, .. } = moving.freeze().await.unwrap();
        assert_eq!(source.state().await, "postmigrate");
        let blocks = moving.memory.blocks();
        let mut missing = later;
        missing.extend(&moving.pending.pages);
        missing.retain(|(block, _)| !blocks[*block].is_kept());
        let place = |name: &str| {
            let mut blocks = moving.prelude.blocks.iter();
            blocks.position(|block| block.name == name).unwrap()
        };
        let places: Vec<usize> = blocks.iter().map(|block| place(&block.name)).collect();
        let mut by_block: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for (block, page) in &missing {
            by_block.entry(places[*block]).or_default().push(*page);
        }
        let discards: Vec<Missing> = by_block
            .into_iter()
            .map(|(block, pages)| Missing {
                block,
                pages: ranges(pages.into_iter()),
            })
            .collect();
        let socket = destination.folder.path().join("pages");
        let (server, connected) = ServerProcess::start(socket).await;
        let began = Instant::now();
        let arriving = incoming.load_without(connected, &tail, &discards).await;
        let arriving = arriving.unwrap();
        assert_eq!(arriving.missing(), missing.len() as u64);
        Self {
            source: moving.memory,
            destination,
            memory,
            server,
            arriving,
            missing,
            places,
            prelude: moving.prelude,
            discards,
            faults: 0,
            began,
        }
    }

    /// Serves what the guest waits for until the devices are loaded.
    async fn loaded(&mut self) {
        loop {
            let event = tokio::time::timeout(FAULT_LIMIT, self.arriving.next_event()).await;
            match event.expect("an event").unwrap() {
                ArrivingEvent::Loaded(loaded) => {
                    println!(
                        "loaded in {:?} with {} pages missing, {} asked for; {:?} in all",
                        loaded.load_time,
                        self.arriving.missing(),
                        self.faults,
                        self.began.elapsed()
                    );
                    return;
                }
                ArrivingEvent::Request(request) => self.serve(request),
                ArrivingEvent::Taken => {}
            }
        }
    }

    fn serve(&mut self, request: Request) {
        self.faults += 1;
        let block = self.places.iter().position(|at| *at == request.block);
        let (block, page) = (block.unwrap(), request.pages.start);
        assert!(self.missing.remove(&(block, page)), "asked for twice");
        self.give(block, &[page]);
    }

    fn give(&mut self, block: usize, pages: &[u64]) {
        let ranges: Vec<BlockRange> = pages.iter().map(|page| BlockRange::new(*page, 1)).collect();
        let mut content = vec![0; pages.len() * BLOCK_SIZE];
        self.source.read(block, &ranges, &mut content).unwrap();
        let (content, _) = content.as_chunks::<BLOCK_SIZE>();
        let given: Vec<(u64, Option<&Page>)> = pages
            .iter()
            .zip(content)
            .map(|(page, content)| {
                (
                    *page,
                    content.iter().any(|byte| *byte != 0).then_some(content),
                )
            })
            .collect();
        self.arriving.give(self.places[block], &given);
    }

    /// Serves what the guest waits for, and nothing else, for this long.
    async fn serve_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            match tokio::time::timeout(left, self.arriving.next_event()).await {
                Ok(event) => self.heard(event.unwrap()),
                Err(_) => return,
            }
        }
    }

    /// Serves what the guest waits for until it has waited so often.
    async fn serve_until_faults(&mut self, faults: usize) {
        while self.faults < faults {
            let event = tokio::time::timeout(FAULT_LIMIT, self.arriving.next_event()).await;
            self.heard(event.expect("it does not run").unwrap());
        }
    }

    fn heard(&mut self, event: ArrivingEvent) {
        match event {
            ArrivingEvent::Request(request) => self.serve(request),
            ArrivingEvent::Taken => {}
            ArrivingEvent::Loaded(_) => panic!("loaded twice"),
        }
    }

    /// Ends as an agent that is killed while it gives a page, and goes on as the next one.
    async fn reconnect(self) -> Self {
        let Self { arriving, .. } = self;
        let lost = arriving.missing();
        drop(arriving);
        let (&(block, page), path) = (self.missing.first().unwrap(), &self.server.socket);
        let words = [4, self.places[block] as u64, page, 1];
        let mut half: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        half.extend([0xff; 1000]);
        let mut killed = UnixStream::connect(path).unwrap();
        killed.write_all(&half).unwrap();
        drop(killed);
        let arriving = Arriving::reconnect(path, &self.prelude).await.unwrap();
        assert!(arriving.missing() >= lost, "what was under way may be lost");
        Self { arriving, ..self }.told()
    }

    /// Kills the page server, and goes on with another one.
    async fn recover(mut self) -> Self {
        self.server.child.kill().unwrap();
        self.server.child.wait().unwrap();
        let Self { arriving, .. } = self;
        let lost = arriving.missing();
        drop(arriving);
        let socket = self.server.socket.clone();
        let refused = Arriving::reconnect(&socket, &self.prelude).await;
        assert!(refused.is_err(), "it was killed");
        let (server, connected) = ServerProcess::start(socket).await;
        let qmp = &self.destination.qmp;
        let path = self.destination.folder.path().join("again");
        let discards = &self.discards;
        let sockets = (&*path, &*path);
        let arriving = Arriving::recover(connected, qmp, sockets, &self.prelude, discards).await;
        let arriving = arriving.unwrap().unwrap();
        assert!(
            arriving.missing() >= lost,
            "given pages may be lost, and no others appear"
        );
        Self {
            server,
            arriving,
            ..self
        }
        .told()
    }

    /// Takes over what is missing.
    fn told(mut self) -> Self {
        self.missing.clear();
        for of_block in self.arriving.missing_pages() {
            let block = self.places.iter().position(|at| *at == of_block.block);
            let pages = of_block.pages.iter().flat_map(BlockRange::blocks);
            self.missing
                .extend(pages.map(|page| (block.unwrap(), page)));
        }
        self
    }

    /// Gives the rest, and what the guest waits for first.
    async fn finish(mut self) -> (Qemu, GuestMemory, Arc<GuestMemory>) {
        while let Some(&(block, _)) = self.missing.first() {
            self.serve_for(Duration::from_millis(1)).await;
            let of_block = self.missing.range((block, 0)..(block + 1, 0));
            let pages: Vec<u64> = of_block.take(BATCH).map(|(_, page)| *page).collect();
            for page in &pages {
                self.missing.remove(&(block, *page));
            }
            self.give(block, &pages);
        }
        assert_eq!(self.arriving.missing(), 0);
        self.arriving.finish(&self.destination.qmp).await.unwrap();
        self.server.ended();
        let status = self.destination.qmp.query("query-migrate").await.unwrap();
        assert_eq!(status["status"], "completed");
        println!("{} faults, {:?} in all", self.faults, self.began.elapsed());
        (self.destination, self.memory, self.source)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_guest_arrives_byte_by_byte() {
    for (label, path) in emulators() {
        for machine in machines(&label) {
            println!("{label} {machine}");
            let spec = Spec::new(&path, machine, Payload::BUSY);
            let source = Qemu::running(&spec).await;
            let mut moved = Moved::start(&source, &spec, 1000..6000).await;
            moved.loaded().await;
            let (destination, memory, from) = moved.finish().await;
            assert_equal(&from, &memory);
            drop(source);
            destination.qmp.query("cont").await.unwrap();
            assert!(
                destination.is_writing(spec.payload).await,
                "it does not run"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_runs_on_the_pages_that_it_asks_for() {
    for (label, path) in emulators() {
        for (machine, shared) in machines(&label).into_iter().zip([false, true]) {
            println!("{label} {machine}");
            let mut spec = Spec::new(&path, machine, Payload::BUSY);
            spec.vcpus = 2;
            if shared {
                let backend = "memory-backend-memfd,id=pc.ram,size=64M,share=on";
                spec.more = ["-object", backend, "-machine", "memory-backend=pc.ram"]
                    .map(str::to_owned)
                    .to_vec();
            }
            let source = Qemu::running(&spec).await;
            // All that the guest writes is missing.
            let mut moved = Moved::start(&source, &spec, 1500..6000).await;
            moved.loaded().await;
            moved.destination.qmp.query("cont").await.unwrap();
            // The agent ends while the guest still asks for pages, then the page server, and again.
            moved.serve_until_faults(1).await;
            let before = moved.faults;
            assert!(before < 3000, "{before} faults");
            let mut moved = moved.reconnect().await.recover().await;
            moved.serve_until_faults(before + 21).await;
            assert!(moved.arriving.missing() > 1000, "it waits for all of it");
            let moved = moved.recover().await.reconnect().await;
            let (destination, memory, from) = moved.finish().await;
            assert!(
                destination.is_writing(spec.payload).await,
                "it does not run"
            );
            // What it does not write is as it was.
            for first in [1500, 5000] {
                let range = [BlockRange::new(first, 500)];
                let (mut ours, mut theirs) = (vec![0; 500 * BLOCK_SIZE], vec![0; 500 * BLOCK_SIZE]);
                from.read(main_block(&from), &range, &mut ours).unwrap();
                memory
                    .read(main_block(&memory), &range, &mut theirs)
                    .unwrap();
                assert!(ours == theirs, "pages from {first} on differ");
            }
        }
    }
}
