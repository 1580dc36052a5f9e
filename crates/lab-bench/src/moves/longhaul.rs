//! Moves a guest between two hosts with Longhaul.

use super::{Case, FINISH_LIMIT, Launcher, MoveRow, Watched, attach, attached, meter};
use crate::measure::{self, ProcessMeter};
use longhaul_api::Guest;
use longhaul_lab::arena::Arena;
use longhaul_lab::error::LabError;
use longhaul_lab::guest::CHANNEL_NAME;
use longhaul_lab::interrupt;
use longhaul_lab::lab::Lab;
use longhaul_lab::peer::QemuProcess;
use longhaul_lab::product::{Finished, Product, channel_socket};
use std::time::Duration;

/// Moves guests with Longhaul.
#[derive(Debug)]
pub struct LonghaulMover<'a> {
    /// The laboratory, whose first two hosts it uses.
    pub lab: &'a Lab,
    /// Longhaul on its hosts.
    pub product: &'a Product,
}

impl LonghaulMover<'_> {
    /// Boots the guest on the first host, moves it to the second, measures, and ends it.
    ///
    /// # Errors
    /// When there is nothing to move, or an agent dies; a failed move is a row.
    pub fn run(&self, case: &Case) -> Result<MoveRow, LabError> {
        self.run_as(case, ("precopy", &[]))
    }

    /// As [`Self::run`], with a strategy, which these options of the move choose.
    ///
    /// # Errors
    /// When there is nothing to move, or an agent dies; a failed move is a row.
    pub fn run_as(
        &self,
        case: &Case,
        (strategy, words): (&str, &[&str]),
    ) -> Result<MoveRow, LabError> {
        let row = MoveRow::of(case, "longhaul", strategy);
        let result = self.boot(case).and_then(|mut guest| {
            self.move_as(row, case, &mut guest, [0, 1], words, Show::Nothing)
        });
        let ended = self.end(case);
        let row = result?;
        ended.map(|()| row)
    }

    /// As [`Self::run`], for a guest that Longhaul did not start, for example from a saved state.
    /// `system` is its name in the row, `words` the options of the move.
    ///
    /// # Errors
    /// When there is nothing to move, or an agent dies; a failed move is a row.
    pub fn run_attached(
        &self,
        case: &Case,
        launcher: &Launcher<'_>,
        (system, words): (&str, &[&str]),
    ) -> Result<MoveRow, LabError> {
        let (arena, source) = self.attach(case, launcher)?;
        let mut guest = launcher.watch(case, arena)?;
        let row = MoveRow::of(case, system, "precopy");
        let row = guest
            .settle(&case.load)
            .and_then(|()| self.move_as(row, case, &mut guest, [0, 1], words, Show::Nothing));
        let ended = self.product.stop_guest(1, &case.guest.name);
        // If it stayed at the source it ends with its process.
        drop(source);
        let row = row?;
        if row.is_completed() {
            ended?;
        }
        Ok(row)
    }

    /// As [`Self::run_attached`]; then lets the guest work at the destination, and moves it back,
    /// as the system `back`.
    ///
    /// # Errors
    /// When there is nothing to move, or an agent dies; a failed move is a row, the last one.
    pub fn run_there_and_back(
        &self,
        case: &Case,
        launcher: &Launcher<'_>,
        (words, work_for, back): (&[&str], Duration, &str),
    ) -> Result<Vec<MoveRow>, LabError> {
        let (arena, source) = self.attach(case, launcher)?;
        let mut guest = launcher.watch(case, arena)?;
        let mut host = 0;
        let rows = guest.settle(&case.load).and_then(|()| {
            let there = MoveRow::of(case, "longhaul-there", "precopy");
            let there = self.carry_as(there, case, [0, 1], words, Show::Nothing)?.0;
            if !there.is_completed() {
                return Ok(vec![there]);
            }
            host = 1;
            interrupt::sleep(work_for)?;
            let socket = channel_socket(self.lab.host(0)?, &case.guest.name, CHANNEL_NAME);
            attach(&guest.arena, &socket)?;
            let back = MoveRow::of(case, back, "precopy");
            let back = self.move_as(back, case, &mut guest, [1, 0], words, Show::Nothing)?;
            host = usize::from(!back.is_completed());
            Ok(vec![there, back])
        });
        let ended = self.product.stop_guest(host, &case.guest.name);
        drop(source);
        let rows = rows?;
        if rows.iter().all(MoveRow::is_completed) {
            ended?;
        }
        Ok(rows)
    }

    fn attach(
        &self,
        case: &Case,
        launcher: &Launcher<'_>,
    ) -> Result<(Arena, QemuProcess), LabError> {
        let name = &case.guest.name;
        let source = launcher.source(case)?;
        let arena = attached(source.channel())?;
        attach(
            &arena,
            &channel_socket(self.lab.host(1)?, name, CHANNEL_NAME),
        )?;
        let socket = source.socket().display().to_string();
        let source = source.release()?;
        let words = ["guests", "attach", name, "--qmp", &socket];
        self.product.ask::<Guest>(0, &words)?;
        Ok((arena, source))
    }

    /// Boots the guest on the first host and lets it settle.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot(&self, case: &Case) -> Result<Watched, LabError> {
        let name = &case.guest.name;
        let arena = attached(&channel_socket(self.lab.host(0)?, name, CHANNEL_NAME))?;
        attach(
            &arena,
            &channel_socket(self.lab.host(1)?, name, CHANNEL_NAME),
        )?;
        self.product.start_guest(self.lab, 0, &case.guest)?;
        let mut guest = Watched {
            arena,
            clients: None,
        };
        guest.settle(&case.load)?;
        Ok(guest)
    }

    /// Ends the guest, on either host.
    ///
    /// # Errors
    /// When neither host could.
    pub fn end(&self, case: &Case) -> Result<(), LabError> {
        // Its host depends on how the move went; the other refuses.
        let [here, there] = [0, 1].map(|host| self.product.stop_guest(host, &case.guest.name));
        here.or(there)
    }

    /// Moves the guest between two hosts, lets it verify its memory, and measures. Its workload
    /// is stopped afterwards.
    ///
    /// # Errors
    /// When an agent dies; a failed move is a row.
    pub fn move_once(
        &self,
        case: &Case,
        guest: &mut Watched,
        [from, to]: [usize; 2],
        show: Show,
    ) -> Result<MoveRow, LabError> {
        let row = MoveRow::of(case, "longhaul", "precopy");
        self.move_as(row, case, guest, [from, to], &[], show)
    }

    fn move_as(
        &self,
        row: MoveRow,
        case: &Case,
        guest: &mut Watched,
        hosts: [usize; 2],
        more: &[&str],
        show: Show,
    ) -> Result<MoveRow, LabError> {
        let (mut row, finished) = self.carry_as(row, case, hosts, more, show)?;
        guest.verify(case, [finished.began, finished.ended], &mut row)?;
        Ok(row)
    }

    fn carry_as(
        &self,
        mut row: MoveRow,
        case: &Case,
        hosts: [usize; 2],
        more: &[&str],
        show: Show,
    ) -> Result<(MoveRow, Finished), LabError> {
        let downtime = format!("{}ms", case.downtime_ms);
        let mut words = vec!["--downtime", downtime.as_str()];
        words.extend(more);
        let limit = case.limit + FINISH_LIMIT;
        let finished = self.carry(&case.guest.name, hosts, &words, limit, show, &mut row)?;
        Ok((row, finished))
    }

    /// Moves a guest between two hosts with these options of the command line, and records the
    /// cost.
    ///
    /// # Errors
    /// When an agent dies; a failed move is recorded.
    pub fn carry<P>(
        &self,
        name: &str,
        [from, to]: [usize; 2],
        words: &[&str],
        limit: Duration,
        show: Show,
        row: &mut MoveRow<P>,
    ) -> Result<Finished, LabError> {
        let link = self.lab.link(from, to)?;
        let before = link.stats()?;
        let agents = [
            self.product.agent(from)?.pid(),
            self.product.agent(to)?.pid(),
        ];
        let meters = [meter(agents[0])?, meter(agents[1])?];
        let source = self.product.guest(from, name)?.and_then(|guest| guest.pid);
        let source_meter = source.map(meter).transpose()?;
        let target = self.lab.host(to)?;
        let finished = match show {
            Show::Nothing => self
                .product
                .migrate_within(from, name, target, words, limit)?,
            Show::Display => self.product.migrate_shown(from, name, target, words)?,
        };
        row.note_link(&before, &link.stats()?);
        if from > to {
            std::mem::swap(&mut row.link_bytes, &mut row.link_bytes_back);
        }
        let [source_used, destination_used] = meters.map(ProcessMeter::finish);
        row.cpu_s.source_agent = source_used.map(|used| used.cpu_s);
        row.cpu_s.destination_agent = destination_used.map(|used| used.cpu_s);
        row.agent_peak_bytes.source = source_used.map(|used| used.peak_bytes);
        row.agent_peak_bytes.destination = destination_used.map(|used| used.peak_bytes);
        row.cpu_s.source_qemu = source_meter
            .and_then(ProcessMeter::finish)
            .map(|used| used.cpu_s);
        let moved = self.product.guest(to, name)?.and_then(|guest| guest.pid);
        row.cpu_s.destination_qemu = moved.and_then(measure::cpu_s);
        row.note_finished(&finished);
        Ok(finished)
    }
}

/// The display of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Nothing.
    Nothing,
    /// The product's own display.
    Display,
}
