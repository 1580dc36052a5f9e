//! Reads a source's memory with a minimal migration loop.

use super::Qemu;
use longhaul_hypervisor::memory::{
    Event, Frozen, GuestMemory, Outgoing, OutgoingError, Prelude, Written,
};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const LIMIT: Duration = Duration::from_secs(300);

/// The pages that the destination does not have.
#[derive(Default)]
pub(crate) struct Pending {
    pub(crate) pages: BTreeSet<(usize, u64)>,
}

impl Pending {
    pub(crate) fn add(&mut self, written: &Written) {
        for run in &written.runs {
            self.pages
                .extend(run.blocks().map(|page| (written.block, page)));
        }
    }

    /// Sends all pages; a page stops being pending before its content is read.
    pub(crate) fn send(&mut self, source: &GuestMemory, destination: &GuestMemory) {
        let pages: Vec<(usize, u64)> = std::mem::take(&mut self.pages).into_iter().collect();
        for batch in pages.chunks(64) {
            for block in 0..source.blocks().len() {
                let pages = batch.iter().filter(|(of, _)| *of == block);
                let ranges: Vec<BlockRange> =
                    pages.map(|(_, page)| BlockRange::new(*page, 1)).collect();
                if ranges.is_empty() {
                    continue;
                }
                let mut content = vec![0; ranges.len() * BLOCK_SIZE];
                source.read(block, &ranges, &mut content).unwrap();
                let name = &source.blocks()[block].name;
                let at = destination.find(name).unwrap();
                destination.write(at, &ranges, &content).unwrap();
            }
        }
    }
}

/// A source under way.
pub(crate) struct Source {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) outgoing: Outgoing,
    pub(crate) prelude: Prelude,
    pub(crate) pending: Pending,
    pub(crate) restarts: u32,
}

impl Source {
    pub(crate) async fn start(qemu: &Qemu) -> Self {
        let memory = Arc::new(qemu.memory().await);
        let path = qemu.folder.path().join("outgoing");
        let started = Outgoing::start(&qemu.qmp, Arc::clone(&memory), &path, None).await;
        let (outgoing, prelude) = started.unwrap();
        Self {
            memory,
            outgoing,
            prelude,
            pending: Pending::default(),
            restarts: 0,
        }
    }

    pub(crate) async fn event(&mut self) -> Event {
        let event = tokio::time::timeout(LIMIT, self.outgoing.next_event()).await;
        let Ok(event) = event else {
            panic!("no event; {:?}", self.outgoing.progress());
        };
        match &event {
            Event::Written(written) => self.pending.add(written),
            Event::Failed(why) => panic!("failed: {why}"),
            Event::Restarted => self.restarts += 1,
            _ => {}
        }
        event
    }

    /// Reads on until a pass is held, and returns its number: 1 where the guest writes nothing. A
    /// QEMU that writes quickly begins its second pass before the first is read to the place where
    /// it is held.
    pub(crate) async fn held(&mut self) -> u64 {
        loop {
            if let Event::Held { pass, .. } = self.event().await {
                return pass;
            }
        }
    }

    pub(crate) async fn freeze(&mut self) -> Result<Frozen, OutgoingError> {
        let frozen = tokio::time::timeout(LIMIT, self.outgoing.freeze())
            .await
            .expect("frozen");
        let frozen = frozen?;
        let written = frozen.written.iter().chain(&frozen.changed);
        written.for_each(|written| self.pending.add(written));
        Ok(frozen)
    }
}

/// Asserts that both have the same content in all blocks that are read from outside.
pub(crate) fn assert_equal(source: &GuestMemory, destination: &GuestMemory) {
    let mut compared = 0;
    for (index, block) in source.blocks().iter().enumerate() {
        if block.is_kept() {
            continue;
        }
        let at = destination.find(&block.name).unwrap();
        let mut different = Vec::new();
        for start in (0..block.blocks()).step_by(256) {
            let range = [BlockRange::new(start, 256.min(block.blocks() - start))];
            let length = range[0].count as usize * BLOCK_SIZE;
            let (mut ours, mut theirs) = (vec![0; length], vec![0; length]);
            source.read(index, &range, &mut ours).unwrap();
            destination.read(at, &range, &mut theirs).unwrap();
            let pairs = ours.chunks(BLOCK_SIZE).zip(theirs.chunks(BLOCK_SIZE));
            let unequal = pairs
                .zip(start..)
                .filter(|((ours, theirs), _)| ours != theirs);
            different.extend(unequal.map(|(_, page)| page));
            compared += range[0].count;
        }
        assert!(
            different.is_empty(),
            "{}: {} pages differ: {:?}",
            block.name,
            different.len(),
            &different[..different.len().min(10)]
        );
    }
    assert!(compared >= 16_384, "{compared} pages compared");
}
