//! The source's agent, as every owner of the engine has to implement it.

use crate::model::Block;
use crate::there::keep_some;
use crate::variant::Variant;
use crate::world::{
    DISK, Frame, Item, Kept, MEMORY, Phase, ToHere, ToThere, World, digest, new_source,
};
use longhaul_codec::{BlockId, Decision, Digest, Staged};
use longhaul_engine::source::Advice;
use longhaul_engine::strategy::Strategy;
use longhaul_protocol::{BlockRange, Epoch};
use std::time::Duration;

impl World {
    pub(crate) fn take(&mut self) {
        self.now += Duration::from_millis(30);
        let advice = self.source.advise(self.now);
        let closed = self.phase >= Phase::Closed || self.is(Variant::ClosedAtStop);
        assert!(advice != Advice::Complete || closed);
        let Some(batch) = self.source.take(self.setting.batch).unwrap() else {
            self.may_take = false;
            return;
        };
        self.batches.push_back((self.epoch, batch));
    }

    pub(crate) fn encode(&mut self) {
        let Some((epoch, batch)) = self.batches.pop_front() else {
            return;
        };
        let early = self.is(Variant::ReadBeforeTake);
        let disk = if early { &self.disk_before } else { &self.disk };
        let content = |id: &BlockId| match id.region {
            MEMORY => self.memory[id.block as usize],
            _ => disk[id.block as usize],
        };
        let content: Vec<Block> = batch.blocks.iter().map(content).collect();
        let staged = content.iter().map(|block| match digest(block) {
            Digest(bytes) if bytes == [0; 16] => Staged::Zero,
            digest => Staged::Content(digest),
        });
        let staged: Vec<Staged> = staged.collect();
        let decisions = self.source.decide(&batch, &staged);
        let mut items = Vec::new();
        for ((id, decision), block) in batch.blocks.iter().zip(decisions).zip(content) {
            let item = match decision {
                Decision::Skip => continue,
                Decision::Zero => Item::Zero,
                Decision::Reference { source, digest } => Item::Reference(source, digest),
                _ => Item::Content(block),
            };
            items.push((*id, item));
        }
        self.source
            .encoded(&batch, (!items.is_empty()).then_some(items.len() * 100));
        if items.is_empty() {
            return;
        }
        let seq = batch.seq;
        let frame = Frame { seq, items };
        if epoch == self.epoch && self.connected {
            self.sent_frames += 1;
            self.frames.push(frame);
        } else {
            self.stragglers.push((epoch, frame));
        }
    }

    pub(crate) fn pass(&mut self) {
        self.passes -= 1;
        self.now += Duration::from_millis(100);
        self.source.pass_started(self.now, false);
        self.report_memory();
        self.source.pass_read();
    }

    pub(crate) fn report_memory(&mut self) {
        for block in std::mem::take(&mut self.dirty) {
            self.source
                .written(MEMORY, BlockRange::new(block, 1))
                .unwrap();
        }
    }

    pub(crate) fn stop(&mut self) {
        self.phase = Phase::Stopped;
        self.script.clear();
        self.report_memory();
        self.source.frozen();
        if self.is(Variant::ClosedAtStop) {
            self.source.closed();
        }
        // QEMU's own writes.
        for op in self.setting.late.clone() {
            self.start(op);
        }
    }

    pub(crate) fn announce(&mut self) {
        if self.source.advise(self.now) != Advice::Complete {
            return;
        }
        self.announced = Some((self.epoch, self.sent_frames));
        let mut next = Some(0);
        while let Some(from) = next {
            let list = self.source.list(DISK, from, 2).unwrap().unwrap();
            next = list.next_chunk;
            self.to_there.push_back(ToThere::List(list));
        }
        self.to_there.push_back(ToThere::Complete(self.sent_frames));
    }

    pub(crate) fn heard_here(&mut self) {
        let Some(message) = self.to_here.pop_front() else {
            return;
        };
        match message {
            ToHere::Want(range) => {
                self.source.wanted(DISK, range).unwrap();
            }
            ToHere::Superseded(range) => self.source.superseded(DISK, range).unwrap(),
            ToHere::Missing(chunks, lacks) => {
                self.source.missing(DISK, chunks, &lacks).unwrap();
            }
            ToHere::Ready => {
                if self.phase != Phase::HandedOver {
                    // QEMU has already flushed the disk.
                    let now = self.model.now();
                    self.model.flushed(now);
                    self.phase = Phase::HandedOver;
                    self.source.handed_over();
                }
                self.to_there.push_back(ToThere::Commit);
            }
        }
    }

    pub(crate) fn cut(&mut self) {
        self.connected = false;
        let epoch = self.epoch;
        self.stragglers
            .extend(self.frames.drain(..).map(|frame| (epoch, frame)));
        self.acks.clear();
        self.to_there.clear();
        self.to_here.clear();
        if !self.is(Variant::CutForgotten) {
            self.source.connection_lost();
        }
    }

    pub(crate) fn reconnect(&mut self) {
        self.connected = true;
        self.source.connected();
        self.epoch += 1;
        self.sent_frames = 0;
        self.announced = None;
        let there = &mut self.there;
        there.complete = false;
        there.destination.connected(Epoch(self.epoch));
        there.presence.connected(Epoch(self.epoch));
        if !there.ready {
            return;
        }
        let tells = self.is_listed() && !self.is(Variant::MissingNotTold);
        let mut next = Some(0).filter(|_| tells);
        while let Some(from) = next {
            let (lacks, then) = self.there.presence.lacks(from, 2);
            let end = then.unwrap_or(self.setting.blocks.div_ceil(64) as u32);
            self.to_here.push_back(ToHere::Missing(from..end, lacks));
            next = then;
        }
        self.to_here.push_back(ToHere::Ready);
    }

    /// Cuts the power of the source's host: its QEMU is gone, its disk stays, and another agent is
    /// started.
    pub(crate) fn lose_power_at_source(&mut self, kept: Kept) {
        keep_some(&mut self.random, kept, &mut self.disk_durable, &self.disk);
        self.disk = self.disk_durable.clone();
        self.restart_source();
    }

    /// Restarts the source's agent.
    pub(crate) fn restart_source(&mut self) {
        if self.connected {
            self.cut();
        }
        self.batches.clear();
        self.source = new_source(&self.setting, Strategy::SHARED);
        for chunk in 0..self.setting.blocks.div_ceil(64) as u32 {
            self.source.missing(DISK, chunk..chunk + 1, &[]).unwrap();
        }
        self.source.frozen();
        self.source.closed();
        self.source.handed_over();
    }
}
