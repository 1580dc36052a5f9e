//! Tests the judgement: on disks that keep their promises, with power cuts at any moment, and on
//! disks with every kind of damage that it reports.

use crate::check::{Check, Finding, Judgement, Keeps, Promise, Wrong};
use crate::order::{Order, Told};
use crate::plan::{Kind, Operation, Plan, SECTOR_BYTES};
use crate::random::Random;
use crate::sector::{Content, Sector, fill, identify};
use crate::table::{Discards, Table};

const SEED: u64 = 11;
const ZEROS: Sector = [0; SECTOR_BYTES];

/// A disk with a volatile cache: for each sector all versions since the last flush.
#[derive(Clone)]
struct CachedDisk {
    versions: Vec<Vec<Sector>>,
}

impl CachedDisk {
    fn new(sectors: u64) -> Self {
        Self {
            versions: vec![vec![ZEROS]; sectors as usize],
        }
    }

    fn put(&mut self, operation: &Operation, count: u64, discards: Discards) {
        if !operation.kind.modifies() {
            return;
        }
        for sector in operation.range().take(count as usize) {
            let mut bytes = ZEROS;
            match operation.kind {
                Kind::Write => {
                    fill(
                        &mut bytes,
                        SEED,
                        operation.disk as u32,
                        sector,
                        operation.number,
                    );
                }
                // Blocks of 8 sectors are discarded, single sectors are not.
                Kind::Discard if discards == Discards::ZerosOrKept && sector % 16 < 8 => continue,
                _ => {}
            }
            self.versions[sector as usize].push(bytes);
        }
    }

    fn flush(&mut self) {
        for versions in &mut self.versions {
            versions.drain(..versions.len() - 1);
        }
    }

    /// Returns the content afterwards: everything, or the random remains of unflushed writes after
    /// a power cut.
    fn image(&self, keeps: Keeps, random: &mut Random) -> Vec<Sector> {
        let chosen = |versions: &Vec<Sector>| match keeps {
            Keeps::Acknowledged => versions[versions.len() - 1],
            Keeps::Flushed => versions[random.below(versions.len() as u64) as usize],
        };
        self.versions.iter().map(chosen).collect()
    }
}

/// A guest that was stopped in the middle of its history.
struct Stopped {
    plan: Plan,
    told: Told,
    images: Vec<Vec<Sector>>,
    promise: Promise,
}

/// Runs a history up to about a number; the guest's last report may be older.
fn run(until: u64, promise: Promise, quiet: bool, random: &mut Random) -> Stopped {
    let plan = Plan::new(SEED, vec![3000, 1500]).unwrap();
    let mut disks: Vec<CachedDisk> = plan.disks().iter().map(|it| CachedDisk::new(*it)).collect();
    let mut order = Order::new(plan.clone());
    let mut told = Told::default();
    while order.told().done < until {
        while random.below(4) > 0 && order.start(u64::MAX).is_some() {}
        if order.under_way().is_empty() {
            continue;
        }
        let chosen = random.below(order.under_way().len() as u64) as usize;
        let operation = order.under_way()[chosen];
        match operation.kind {
            Kind::Flush { .. } => disks[operation.disk].flush(),
            _ => disks[operation.disk].put(&operation, operation.sectors, promise.discards),
        }
        order.finish(operation.number);
        if random.below(5) == 0 {
            told = order.told();
        }
    }
    if quiet {
        while let Some(operation) = order.under_way().first().copied() {
            match operation.kind {
                Kind::Flush { .. } => disks[operation.disk].flush(),
                _ => disks[operation.disk].put(&operation, operation.sectors, promise.discards),
            }
            order.finish(operation.number);
        }
        told = Told {
            quiet: true,
            ..order.told()
        };
    }
    // Operations under way are partly there.
    for operation in order.under_way().iter().filter(|it| it.sectors > 0) {
        let count = random.below(operation.sectors + 1);
        disks[operation.disk].put(operation, count, promise.discards);
    }
    let images = disks.iter().map(|disk| disk.image(promise.keeps, random));
    Stopped {
        images: images.collect(),
        plan,
        told,
        promise,
    }
}

impl Stopped {
    fn judge(&self) -> Judgement {
        let promises = vec![self.promise; self.images.len()];
        let mut check = Check::new(self.plan.clone(), self.told, promises);
        for (disk, image) in self.images.iter().enumerate() {
            check.look(disk, 0, image.as_flattened());
        }
        check.judge()
    }

    /// Returns the first later operation that is still visible in a sector, with that sector.
    fn shown_after(&self, number: u64, disk: usize) -> (u64, usize) {
        let show = |(sector, bytes): (usize, &Sector)| match identify(
            bytes,
            SEED,
            disk as u32,
            sector as u64,
        ) {
            Content::Written(found) if found > number => Some((found, sector)),
            _ => None,
        };
        let shown = self.images[disk].iter().enumerate().filter_map(show);
        shown.min().expect("an operation that can be seen")
    }

    /// Returns the last operation of a kind, with a sector of it that no later operation has
    /// written.
    fn last_of(&self, kind: Kind, disk: usize) -> (Operation, usize) {
        self.last_before(self.told.done, kind, disk)
    }

    /// As [`Self::last_of`], among those before a number.
    fn last_before(&self, end: u64, kind: Kind, disk: usize) -> (Operation, usize) {
        let modify = |number: u64| {
            let operation = self.plan.operation(number);
            (operation.disk == disk && operation.kind.modifies()).then_some(operation)
        };
        let done = self.told.done;
        (0..end)
            .rev()
            .filter_map(modify)
            .filter(|it| it.kind == kind)
            .find_map(|it| {
                let later: Vec<Operation> = (it.number + 1..done).filter_map(modify).collect();
                let alone = |sector: &u64| !later.iter().any(|it| it.range().contains(sector));
                Some((it, it.range().find(alone)? as usize))
            })
            .expect("one that is not written over")
    }
}

const WHOLE: Promise = Promise {
    keeps: Keeps::Acknowledged,
    discards: Discards::Zeros,
};

fn only(judgement: &Judgement) -> &Finding {
    assert_eq!(judgement.findings.len(), 1, "{:#?}", judgement.findings);
    assert_eq!(judgement.wrong_sectors, judgement.findings[0].sectors);
    &judgement.findings[0]
}

#[test]
fn nothing_is_found_on_disks_that_do_what_they_promise() {
    let mut random = Random::new(4);
    for keeps in [Keeps::Acknowledged, Keeps::Flushed] {
        for discards in [Discards::Zeros, Discards::ZerosOrKept] {
            for quiet in [false, true] {
                for _ in 0..12 {
                    let until = 1 + random.below(400);
                    let promise = Promise { keeps, discards };
                    let stopped = run(until, promise, quiet, &mut random);
                    let judgement = stopped.judge();
                    assert_eq!(judgement.findings, [], "{promise:?} {until}");
                    assert_eq!(judgement.sectors, 4500);
                    assert!(judgement.done >= stopped.told.done);
                }
            }
        }
    }
}

#[test]
fn a_write_that_was_lost_is_found() {
    for quiet in [false, true] {
        let mut stopped = run(300, WHOLE, quiet, &mut Random::new(1));
        let (operation, sector) = stopped.last_of(Kind::Write, 1);
        stopped.images[1][sector] = ZEROS;
        let judgement = stopped.judge();
        let finding = only(&judgement);
        assert_eq!((finding.disk, finding.first), (1, sector as u64));
        let Wrong::Lost { found, expected } = finding.wrong else {
            panic!("{finding}");
        };
        assert_eq!((found, expected.number), (None, operation.number));
        let text = finding.to_string();
        let named = format!("disk 1, offset {}, 512 bytes: zeros", sector * SECTOR_BYTES);
        assert!(text.starts_with(&named), "{text}");
    }
}

#[test]
fn an_older_write_under_a_newer_one_is_found() {
    let mut stopped = run(400, WHOLE, true, &mut Random::new(2));
    // A sector that two operations wrote: the older is restored, as after reordered writes.
    let writes = |number: &u64, sector| stopped.plan.operation(*number).writes(0, sector as u64);
    let (newer, older, sector) = (0..3000)
        .find_map(|sector| {
            let mut on_it = (0..stopped.told.done).rev().filter(|it| writes(it, sector));
            let (newer, older) = (on_it.next()?, on_it.next()?);
            let shown = identify(&stopped.images[0][sector], SEED, 0, sector as u64);
            (shown == Content::Written(newer)).then_some((newer, older, sector))
        })
        .unwrap();
    fill(
        &mut stopped.images[0][sector],
        SEED,
        0,
        sector as u64,
        older,
    );
    let judgement = stopped.judge();
    let finding = only(&judgement);
    let Wrong::Lost { found, expected } = finding.wrong else {
        panic!("{finding}");
    };
    assert_eq!((found, expected.number), (Some(older), newer));
    let flush = expected.flushed.expect("there was a flush since");
    let text = format!(
        "disk 0, offset {}, 512 bytes: operation {older} of {}, expected {newer} (flushed at \
         {flush})",
        sector * SECTOR_BYTES,
        stopped.told.done
    );
    assert_eq!(finding.to_string(), text);
}

#[test]
fn what_was_flushed_must_outlive_a_power_cut_and_the_rest_need_not() {
    let promise = Promise {
        keeps: Keeps::Flushed,
        discards: Discards::Zeros,
    };
    let (mut lost, mut allowed) = (0, 0);
    for seed in 0..20 {
        let mut stopped = run(300, promise, true, &mut Random::new(seed));
        let flush = stopped.judge().flushed[0].unwrap();
        let end = [flush, stopped.told.done][seed as usize % 2];
        let (operation, sector) = stopped.last_before(end, Kind::Write, 0);
        stopped.images[0][sector] = ZEROS;
        if operation.number < flush {
            let judgement = stopped.judge();
            let finding = only(&judgement);
            assert!(
                matches!(
                    finding.wrong,
                    Wrong::Lost { expected, .. } if expected.flushed == Some(flush)
                ),
                "{finding}"
            );
            lost += 1;
        } else {
            // Content that was durable before may be back.
            let durable = (0..flush)
                .rev()
                .map(|number| stopped.plan.operation(number))
                .find(|it| {
                    it.disk == 0 && it.kind.modifies() && it.range().contains(&(sector as u64))
                });
            if let Some(it) = durable.filter(|it| it.kind == Kind::Write) {
                fill(
                    &mut stopped.images[0][sector],
                    SEED,
                    0,
                    sector as u64,
                    it.number,
                );
            }
            assert_eq!(stopped.judge().findings, []);
            allowed += 1;
        }
    }
    assert!(lost > 0 && allowed > 0, "{lost} {allowed}");
}

#[test]
fn without_a_word_of_the_guest_the_images_tell_what_was_flushed() {
    let mut stopped = run(400, WHOLE, true, &mut Random::new(3));
    stopped.told = Told::default();
    stopped.promise.keeps = Keeps::Flushed;
    let judgement = stopped.judge();
    assert_eq!(judgement.findings, []);
    let flush = judgement.flushed[0].unwrap();
    assert!(flush > 250, "{judgement:?}");
    let (number, sector) = stopped.shown_after(0, 0);
    assert!(number < flush);
    stopped.images[0][sector] = ZEROS;
    assert!(matches!(only(&stopped.judge()).wrong, Wrong::Lost { .. }));
}

#[test]
fn a_disk_that_stayed_behind_another_is_found() {
    // The second disk is in a much earlier state than the first: all flushed content in between is
    // missing, which is detectable without the guest's report.
    let promise = Promise {
        keeps: Keeps::Flushed,
        discards: Discards::Zeros,
    };
    let early = run(100, WHOLE, true, &mut Random::new(5));
    let mut late = run(400, WHOLE, true, &mut Random::new(5));
    late.images[1].clone_from(&early.images[1]);
    late.told = Told::default();
    late.promise = promise;
    let judgement = late.judge();
    assert!(judgement.wrong_sectors > 100, "{judgement:?}");
    assert!(judgement.findings.iter().all(|it| it.disk == 1));
}

#[test]
fn what_was_discarded_or_zeroed_does_not_come_back() {
    for kind in [Kind::Discard, Kind::Zero] {
        let mut stopped = run(500, WHOLE, true, &mut Random::new(6));
        let (operation, sector) = stopped.last_of(kind, 0);
        let earlier = (0..operation.number)
            .rev()
            .find(|it| stopped.plan.operation(*it).writes(0, sector as u64));
        let earlier = earlier.expect("a write before it");
        fill(
            &mut stopped.images[0][sector],
            SEED,
            0,
            sector as u64,
            earlier,
        );
        let judgement = stopped.judge();
        let finding = only(&judgement);
        let Wrong::Stale { found, expected } = finding.wrong else {
            panic!("{finding}");
        };
        assert_eq!((found, expected.number), (earlier, operation.number));
        assert!(finding.to_string().contains("zeroed or discarded"));
        // A disk that does not promise zeros may keep discarded content, and nothing older.
        stopped.promise.discards = Discards::ZerosOrKept;
        let allowed = stopped.judge().findings.is_empty();
        assert_eq!(allowed, kind == Kind::Discard);
    }
}

#[test]
fn a_torn_sector_is_found() {
    let mut stopped = run(300, WHOLE, true, &mut Random::new(7));
    let (operation, sector) = stopped.last_of(Kind::Write, 0);
    stopped.images[0][sector][256..].fill(0);
    let judgement = stopped.judge();
    let finding = only(&judgement);
    let torn = Wrong::Torn {
        number: operation.number,
        byte: 256,
    };
    assert_eq!(finding.wrong, torn);
    assert!(
        finding
            .to_string()
            .contains("torn or damaged from byte 256")
    );
}

#[test]
fn foreign_bytes_are_found() {
    let original = run(300, WHOLE, true, &mut Random::new(8));
    let (operation, sector) = original.last_of(Kind::Write, 0);
    let number = operation.number;
    let mut foreign = ZEROS;
    foreign[511] = 1;
    let (mut other, mut neighbour) = (ZEROS, ZEROS);
    fill(&mut other, SEED + 1, 0, sector as u64, number);
    fill(&mut neighbour, SEED, 1, sector as u64 + 3, number);
    let mut never = ZEROS;
    let not_here = (0..300).find(|it| !original.plan.operation(*it).writes(0, sector as u64));
    let not_here = not_here.unwrap();
    fill(&mut never, SEED, 0, sector as u64, not_here);
    let later =
        (original.told.done..).find(|it| original.plan.operation(*it).writes(0, sector as u64));
    let later = later.unwrap();
    let mut not_yet = ZEROS;
    fill(&mut not_yet, SEED, 0, sector as u64, later);
    let misplaced = Wrong::Misplaced {
        number,
        disk: 1,
        shift: 3,
    };
    for (bytes, wrong) in [
        (foreign, Wrong::Foreign),
        (other, Wrong::OtherHistory { seed: SEED + 1 }),
        (neighbour, misplaced),
        (never, Wrong::Never { number: not_here }),
        (not_yet, Wrong::Never { number: later }),
    ] {
        let mut stopped = run(300, WHOLE, true, &mut Random::new(8));
        stopped.images[0][sector] = bytes;
        assert_eq!(only(&stopped.judge()).wrong, wrong);
    }
}

#[test]
fn what_a_discard_freed_may_be_in_use_elsewhere_until_a_flush() {
    for (discards, excused) in [(Discards::ZerosOrKept, true), (Discards::Zeros, false)] {
        let promise = Promise {
            keeps: Keeps::Flushed,
            discards,
        };
        let mut stopped = run(300, promise, true, &mut Random::new(12));
        let flush = stopped.judge().flushed[1].unwrap();
        let (operation, sector) = stopped.last_of(Kind::Discard, 1);
        assert!(operation.number > flush, "{operation:?} {flush}");
        let mut elsewhere = ZEROS;
        fill(&mut elsewhere, SEED, 1, sector as u64 + 64, flush + 1);
        stopped.images[1][sector] = elsewhere;
        let judgement = stopped.judge();
        assert_eq!(judgement.findings.is_empty(), excused);
        assert_eq!(judgement.reused_sectors, u64::from(excused));
        // Without a discard it is wrong.
        let (_, sector) = stopped.last_before(flush, Kind::Write, 1);
        stopped.images[1][sector] = elsewhere;
        let findings = stopped.judge().findings;
        assert!(matches!(
            findings.last().unwrap().wrong,
            Wrong::Misplaced { .. }
        ));
    }
}

#[test]
fn an_image_that_is_too_short_is_found_and_findings_are_limited() {
    let mut stopped = run(300, WHOLE, true, &mut Random::new(9));
    stopped.images[0].truncate(2990);
    let judgement = stopped.judge();
    let finding = only(&judgement);
    assert_eq!((finding.first, finding.sectors), (2990, 10));
    assert_eq!(finding.wrong, Wrong::Missing);
    let mut stopped = run(300, WHOLE, true, &mut Random::new(9));
    for sector in (0..3000).step_by(2) {
        stopped.images[0][sector] = [7; SECTOR_BYTES];
    }
    let judgement = stopped.judge();
    assert!(judgement.findings.len() <= crate::check::FINDINGS_KEPT);
    assert!(judgement.wrong_sectors >= 1500);
}

#[test]
fn a_guest_reads_back_what_the_judge_expects() {
    let stopped = run(300, WHOLE, true, &mut Random::new(10));
    for (disk, image) in stopped.images.iter().enumerate() {
        let mut table = Table::new(SEED, disk as u32, image.len() as u64, Discards::Zeros);
        for number in 0..stopped.told.done {
            let operation = stopped.plan.operation(number);
            if operation.disk == disk {
                table.apply(&operation);
            }
        }
        let entries = table.entries(0, table.sectors());
        assert_eq!(table.compare(0, &entries, image.as_flattened()), None);
    }
}
