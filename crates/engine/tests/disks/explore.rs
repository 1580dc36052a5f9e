//! Runs a world to its end, in an order that the caller chooses.

use crate::model::Random;
use crate::world::{Setting, Step, World};

/// Limit on the steps of a run.
const STEPS_MAX: usize = 5000;

fn is_adverse(step: Step) -> bool {
    matches!(
        step,
        Step::Fail(_)
            | Step::Straggler(_)
            | Step::Cut
            | Step::Die
            | Step::DieInFrame(_)
            | Step::PowerCut(_)
            | Step::FailSync
            | Step::FailStore
            | Step::Restart
            | Step::SourcePowerCut(_)
    )
}

fn end(world: &mut World) {
    let blocks = world.setting.blocks;
    world.check(&world.there.live, 0..blocks * 8, "in the end");
    // The source is not needed any more, whatever happens next.
    let durable = world.there.durable.clone();
    let power_cut = std::mem::replace(&mut world.power_cut, true);
    world.check(&durable, 0..blocks * 8, "durable in the end");
    world.power_cut = power_cut;
}

/// Runs a world in which at these steps another event than the usual one happens. Returns the
/// number of possible events at each step.
fn run(setting: &Setting, choices: &[(usize, usize)]) -> Vec<usize> {
    let mut world = World::new(setting.clone(), 1);
    let mut alternatives = Vec::new();
    let mut choices = choices.iter().peekable();
    for at in 0..STEPS_MAX {
        if world.is_over() {
            end(&mut world);
            return alternatives;
        }
        let steps = world.steps();
        alternatives.push(steps.len());
        let chosen = match choices.next_if(|(when, _)| *when == at) {
            Some((_, which)) => steps.get(*which).copied(),
            None => steps.iter().copied().find(|step| !is_adverse(*step)),
        };
        let Some(step) = chosen else {
            panic!("nothing more can happen: {}", world.tell());
        };
        world.run(step);
    }
    panic!("it never ends: {}", world.tell());
}

/// Runs every order that differs from the usual one in at most `most` places. Returns their number.
pub(crate) fn deviations(setting: &Setting, most: usize) -> usize {
    fn below(setting: &Setting, choices: &mut Vec<(usize, usize)>, most: usize) -> usize {
        let alternatives = run(setting, choices);
        let mut runs = 1;
        if choices.len() == most {
            return runs;
        }
        let from = choices.last().map_or(0, |(at, _)| at + 1);
        for (at, count) in alternatives.iter().enumerate().skip(from) {
            for which in 1..*count {
                choices.push((at, which));
                runs += below(setting, choices, most);
                choices.pop();
            }
        }
        runs
    }
    below(setting, &mut Vec::new(), most)
}

/// Runs a world in a random order.
pub(crate) fn random(setting: Setting, seed: u64) {
    let mut random = Random(seed ^ 0x5eed);
    let mut world = World::new(setting, seed);
    for _ in 0..STEPS_MAX {
        if world.is_over() {
            return end(&mut world);
        }
        let steps = world.steps();
        let (adverse, usual): (Vec<Step>, Vec<Step>) =
            steps.into_iter().partition(|step| is_adverse(*step));
        let bad = usual.is_empty() || random.below(25) == 0;
        let from = if bad && !adverse.is_empty() {
            &adverse
        } else {
            &usual
        };
        if from.is_empty() {
            panic!("nothing more can happen, seed {seed}: {}", world.tell());
        }
        // Often the usual event: then one side gets far ahead of the others.
        let among = if random.below(3) == 0 { 1 } else { from.len() };
        let step = from[random.below(among as u64) as usize];
        world.run(step);
    }
    panic!("seed {seed} never ends: {}", world.tell());
}
