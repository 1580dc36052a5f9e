//! Fetches the memory of a guest that runs here before all of it has arrived.

use crate::destination::arriving_memory::{self, ArrivingMemory, MemoryNews};
use crate::destination::attempt::Following;
use crate::destination::fetch::connection::missing;
use crate::destination::fetch::{Fetch, send};
use crate::destination::page_server;
use crate::host::memory_notes::{ArrivingNote, ArrivingRegion, MemoryNote};
use crate::status::faults;
use crate::status::usage::used_there;
use longhaul_api::RegionProgress;
use longhaul_hypervisor::Guest;
use longhaul_protocol::message::{Faults, ToSource, Used};
use longhaul_protocol::wire::VERSION_OF_RATES;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::block_in_place;

/// The memory of a guest of which a part has yet to arrive.
pub(crate) struct FetchedMemory {
    pub(super) note: ArrivingNote,
    /// What serves QEMU; `None` while nothing does.
    served: Option<Arc<ArrivingMemory>>,
    news: Option<mpsc::UnboundedReceiver<MemoryNews>>,
    /// Why QEMU cannot be served.
    trouble: Option<String>,
    /// How many blocks the source cannot read.
    unreadable_blocks: u64,
    /// What the guest has waited for, if this agent knows it from the beginning.
    faults: Option<Faults>,
    /// The processor time of the page server, once all memory is here.
    server_cpu: Option<Duration>,
    /// Whether this agent has served QEMU from the beginning.
    from_the_start: bool,
}

/// Waits for news of memory.
pub(super) async fn next_of_memory(memory: &mut Option<FetchedMemory>) -> MemoryNews {
    if let Some(memory) = memory
        && let Some(news) = &mut memory.news
    {
        if let Some(news) = news.recv().await {
            return news;
        }
        memory.news = None;
        if memory.served.is_some() && !memory.note.whole {
            // The attempt heard why.
            return MemoryNews::Gone("nothing serves it any more".to_owned());
        }
    }
    std::future::pending().await
}

impl FetchedMemory {
    /// Goes on with what the attempt has of it, or with the note of an earlier agent.
    pub(super) fn new(mut note: ArrivingNote, following: Option<Following>) -> Self {
        note.whole |= following.as_ref().is_some_and(|it| it.memory.is_whole());
        let from_the_start = following.is_some();
        let (served, news) = following.map(|it| (it.memory, it.news)).unzip();
        let mut memory = Self {
            note,
            served,
            news,
            trouble: None,
            unreadable_blocks: 0,
            faults: None,
            server_cpu: None,
            from_the_start,
        };
        if memory.note.whole {
            memory.is_here();
        }
        memory
    }

    /// Records that QEMU has all memory, and what the guest has waited for.
    fn is_here(&mut self) {
        self.note.whole = true;
        let served = self.served.take();
        self.server_cpu = served.as_ref().and_then(|served| served.server_cpu());
        let served = served.filter(|_| self.from_the_start);
        self.faults = served.and_then(|served| served.faults());
    }

    pub(super) fn specs(&self) -> Vec<RegionSpec> {
        let regions = self.note.regions.iter();
        regions.map(|region| region.spec.clone()).collect()
    }

    /// Returns what takes blocks.
    pub(super) fn taker(&self) -> Option<Arc<ArrivingMemory>> {
        self.served.clone()
    }

    /// Returns whether QEMU takes what arrives, or has everything.
    pub(super) fn listens(&self) -> bool {
        self.note.whole || self.served.is_some()
    }

    /// Returns whether the source has lost memory that is missing.
    pub(super) fn is_lost(&self) -> bool {
        self.unreadable_blocks > 0 && !self.note.whole
    }

    pub(super) fn trouble(&self) -> Option<String> {
        let bytes = self.unreadable_blocks.saturating_mul(BLOCK_SIZE as u64);
        let unreadable = || {
            (bytes > 0).then(|| {
                format!(
                    "the source has lost {bytes} bytes of its memory, for which it waits: it \
                     cannot go on; give them up with `longhaul resolve`, and start it again"
                )
            })
        };
        self.trouble.clone().or_else(unreadable)
    }

    pub(super) fn progress(&self) -> Vec<RegionProgress> {
        let first: u64 = self.note.regions.iter().map(ArrivingRegion::blocks).sum();
        let (missing, waiting) = match &self.served {
            Some(served) => served.counts(),
            None if self.note.whole => (0, 0),
            None => (first, 0),
        };
        let all: u64 = self.specs().iter().map(|spec| spec.blocks).sum();
        vec![RegionProgress {
            name: "memory".to_owned(),
            blocks_total: all,
            blocks_settled: all.saturating_sub(missing),
            blocks_pending: missing,
            disk: false,
            strategy: None,
            why: None,
            waiting: Some(waiting),
            unreadable_byte: None,
        }]
    }
}

impl Fetch {
    /// Serves QEMU again, if nothing does.
    pub(super) async fn serve_memory(&mut self) {
        let waits = |memory: &FetchedMemory| !memory.listens();
        let Some(mut note) = self
            .memory
            .as_ref()
            .filter(|it| waits(it))
            .map(|it| it.note.clone())
        else {
            return;
        };
        let (served, serving, news) = arriving_memory::hold();
        let parts = &self.context.parts;
        let name = (parts.config.state.as_path(), self.guest());
        let goes_on = serving.go_on(&parts.guests, name, &mut note).await;
        let Some(memory) = &mut self.memory else {
            return;
        };
        memory.note.server = note.server;
        match goes_on {
            Ok(true) => {
                memory.trouble = None;
                memory.served = Some(served);
                memory.news = Some(news);
            }
            Ok(false) => {
                let guest = &self.begun.handover.ledger.guest;
                tracing::error!(guest, "its QEMU has ended, and needs no memory any more");
                memory.trouble = None;
                memory.note.whole = true;
                self.trouble = None;
                self.note_memory();
            }
            Err(why) => {
                let why = format!("its QEMU cannot be given the rest of its memory: {why}");
                if memory.trouble.as_ref() != Some(&why) {
                    tracing::error!(guest = self.begun.handover.ledger.guest, "{why}");
                }
                memory.trouble = Some(why);
            }
        }
    }

    pub(super) async fn of_memory(&mut self, news: MemoryNews) {
        match news {
            MemoryNews::Want(region, range) => {
                let ranges = vec![range];
                self.tell(&ToSource::Want { region, ranges }).await;
            }
            MemoryNews::Whole => {
                if let Some(memory) = &mut self.memory {
                    memory.is_here();
                }
                self.note_memory();
                tracing::info!(guest = self.guest(), "all of its memory is here");
                self.show();
                self.whole().await;
            }
            MemoryNews::Gone(why) => {
                if let Some(memory) = &mut self.memory {
                    memory.served = None;
                    memory.from_the_start = false;
                }
                self.pause(&format!("its QEMU does not take memory: {why}"));
            }
        }
    }

    /// Reports what the guest has waited for, here and at the source.
    pub(super) async fn tell_faults(&mut self) {
        let memory = self.memory.as_ref();
        let Some((memory, faults)) = memory.and_then(|it| Some((it, it.faults?))) else {
            return;
        };
        if let Some(entry) = &self.begun.entry {
            entry.report_with(|report| faults::report(&faults, &memory.specs(), report));
        }
        self.tell(&ToSource::Faults(faults)).await;
    }

    /// Reports what the move has cost here, also to the source.
    pub(super) async fn tell_used(&mut self) {
        let Some(meter) = &self.begun.meter else {
            return;
        };
        let usage = meter.usage(None);
        let server_cpu = self.memory.as_ref().and_then(|memory| memory.server_cpu);
        let used = Used {
            agent_cpu_us: usage.agent_cpu.as_micros() as u64,
            agent_peak_bytes: usage.agent_peak_bytes,
            page_server_cpu_us: server_cpu.map(|cpu| cpu.as_micros() as u64),
        };
        if let Some(entry) = &self.begun.entry {
            entry.report_with(|report| used_there(&used, &mut report.cost.destination));
        }
        let call = self.begun.call.as_ref();
        if call.is_some_and(|call| call.control.peer().version >= VERSION_OF_RATES) {
            self.tell(&ToSource::Used(used)).await;
        }
    }

    /// Ends a guest whose missing memory is given up: it cannot go on without. Returns what is
    /// lost; `None` if no memory is missing.
    pub(super) fn end_without_memory(&mut self) -> Result<Option<String>, String> {
        let Some(memory) = self.memory.as_mut().filter(|memory| !memory.note.whole) else {
            return Ok(None);
        };
        let guest = &self.begun.handover.ledger.guest;
        let guests = &self.context.parts.guests;
        let found = guests.find(guest).map_err(|error| error.to_string())?;
        let ended = found.as_ref().map_or(Ok(()), Guest::kill);
        ended.map_err(|error| format!("its QEMU cannot be ended: {error}"))?;
        tracing::error!(guest, "missing memory is given up: its QEMU is ended");
        memory.note.whole = true;
        memory.served = None;
        self.note_memory();
        let lost = "memory that it waited for: its QEMU was ended, and it can be started again";
        Ok(Some(lost.to_owned()))
    }

    /// Notes for a later agent that all memory is here.
    fn note_memory(&self) {
        let state = &self.context.parts.config.state;
        if let Some(memory) = &self.memory
            && let Err(error) = block_in_place(|| memory.note.write(state, self.guest()))
        {
            // A later agent asks QEMU.
            tracing::warn!(guest = self.guest(), %error, "not noted: its memory is here");
        }
    }

    /// Removes the note of what was missing: all of the guest is here.
    pub(super) async fn forget_memory(&self) {
        let state = &self.context.parts.config.state;
        if let Some(memory) = &self.memory {
            page_server::forget(state, self.guest(), memory.note.migration).await;
        }
    }

    /// Sends which blocks of memory are missing.
    pub(super) async fn send_missing_memory(&mut self) -> Result<(), String> {
        let Some(memory) = &mut self.memory else {
            return Ok(());
        };
        memory.unreadable_blocks = 0;
        let lacks = match &memory.served {
            Some(served) => served.missing().await.ok_or("its QEMU is gone")?,
            None => Vec::new(),
        };
        for ArrivingRegion { spec, .. } in &memory.note.regions {
            let of = lacks.iter().find(|(region, _)| *region == spec.id);
            let lacks = of.map_or(&[][..], |(_, lacks)| lacks);
            for missing in missing(spec.id, spec.blocks, lacks) {
                send(&mut self.begun.call, &ToSource::Missing(missing));
            }
        }
        Ok(())
    }

    /// Asks again for what the guest waits for.
    pub(super) async fn want_memory(&mut self) {
        let served = self.memory.as_ref().and_then(FetchedMemory::taker);
        let asked = served.map(|served| served.asked());
        for (region, range) in asked.unwrap_or_default() {
            let ranges = vec![range];
            self.tell(&ToSource::Want { region, ranges }).await;
        }
    }

    /// Shows that the source cannot read memory: its QEMU has ended.
    pub(super) fn memory_is_unreadable(&mut self, region: RegionId, ranges: &[BlockRange]) {
        let Some(memory) = &mut self.memory else {
            return;
        };
        if memory.note.regions.iter().all(|it| it.spec.id != region) {
            return;
        }
        let blocks: u64 = ranges.iter().map(|range| range.count).sum();
        memory.unreadable_blocks = memory.unreadable_blocks.saturating_add(blocks);
        tracing::error!(
            guest = self.begun.handover.ledger.guest,
            blocks,
            "memory is lost"
        );
        self.show();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::MigrationId;
    use longhaul_protocol::disk::Pulled;

    #[tokio::test]
    async fn memory_that_nothing_serves_any_more_is_served_again() {
        let note = ArrivingNote {
            migration: MigrationId([7; 8]),
            digest_key: [1; 32],
            pulled: Pulled::All,
            prelude: Vec::new(),
            regions: Vec::new(),
            whole: false,
            server: None,
        };
        let (memory, serving, news) = arriving_memory::hold();
        let mut fetched = Some(FetchedMemory::new(note, Some(Following { memory, news })));
        assert!(fetched.as_ref().is_some_and(FetchedMemory::listens));
        // The attempt took the news that the page server has ended.
        drop(serving);
        let news = next_of_memory(&mut fetched).await;
        assert!(matches!(news, MemoryNews::Gone(_)), "{news:?}");
    }
}
