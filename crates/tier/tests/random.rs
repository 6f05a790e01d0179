//! Any order of calls, with pieces that end in any order, against a plain map.

mod common;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use common::{KINDS, Kind, Rig, filled, pattern};
use proptest::prelude::*;
use shardwise_tier::testing::{Fault, Faults};
use shardwise_tier::{Buffer, ObjectId, Reading, TierError};

const BUFFER: usize = 32 << 10;
const COUNT: usize = 4;
const OBJECTS: usize = 3;
const TILES: usize = 4;

#[derive(Debug, Clone)]
enum Call {
    Write { object: usize, tile: usize, bytes: usize },
    Read { object: usize, tile: usize },
    Wait { which: usize },
    Cancel { which: usize },
    Hold,
    Give { which: usize },
    Flush,
    Recreate { object: usize },
    Fault(Fault),
}

fn call() -> impl Strategy<Value = Call> {
    let bytes = prop_oneof![Just(0), Just(1), 511..514usize, 4095..4098usize, 0..=BUFFER, Just(BUFFER)];
    let which = 0..8usize;
    let faults = prop_oneof![
        (0..3u64, 1..20_000usize).prop_map(|(nth, bytes)| Fault::ShortRead { nth, bytes }),
        (0..3u64, 1..20_000usize).prop_map(|(nth, bytes)| Fault::ShortWrite { nth, bytes }),
    ];
    prop_oneof![
        6 => (0..OBJECTS, 0..TILES, bytes).prop_map(|(object, tile, bytes)| Call::Write { object, tile, bytes }),
        6 => (0..OBJECTS, 0..TILES).prop_map(|(object, tile)| Call::Read { object, tile }),
        4 => which.clone().prop_map(|which| Call::Wait { which }),
        2 => which.clone().prop_map(|which| Call::Cancel { which }),
        1 => Just(Call::Hold),
        2 => which.prop_map(|which| Call::Give { which }),
        1 => Just(Call::Flush),
        1 => (0..OBJECTS).prop_map(|object| Call::Recreate { object }),
        1 => faults.prop_map(Call::Fault),
    ]
}

struct Model {
    rig: Rig,
    kind: Kind,
    faults: Faults,
    objects: Vec<ObjectId>,
    stored: HashMap<(usize, usize), Vec<u8>>,
    /// What each read must bring.
    readings: Vec<(Reading, Vec<u8>)>,
    held: Vec<Buffer>,
    writes: usize,
}

impl Model {
    fn new(kind: Kind, seed: u64) -> Self {
        let faults = Faults::new().with_delays(seed, Duration::from_micros(200));
        let mut rig = Rig::with(kind, COUNT, BUFFER, faults.clone());
        let objects = (0..OBJECTS).map(|i| rig.tier.create(&i.to_string(), TILES).unwrap()).collect();
        Self { rig, kind, faults, objects, stored: HashMap::new(), readings: vec![], held: vec![], writes: 0 }
    }

    /// A buffer, and that there is one exactly if there can be.
    fn buffer(&mut self) -> Option<Buffer> {
        // Tiles that needed no reading are in their buffers, those in memory always.
        let out = self.readings.len() + self.held.len();
        match self.rig.tier.buffer() {
            Ok(buffer) => {
                assert!(out < COUNT);
                Some(buffer)
            }
            Err(TierError::NoBuffer { count, reading, held, .. }) => {
                assert_eq!((out, count, reading + held), (COUNT, COUNT, COUNT));
                None
            }
            Err(error) => panic!("{}: {error}", self.kind.name),
        }
    }

    fn run(&mut self, call: Call) -> Result<(), TierError> {
        match call {
            Call::Write { object, tile, bytes } => {
                let Some(buffer) = self.buffer() else { return Ok(()) };
                self.writes += 1;
                let content = pattern(self.writes, bytes);
                self.rig.tier.start_write(self.objects[object], tile, filled(buffer, &content))?;
                self.stored.insert((object, tile), content);
            }
            Call::Read { object, tile } => {
                let Some(mut buffer) = self.buffer() else { return Ok(()) };
                buffer.set_len(100);
                let reading = self.rig.tier.start_read(self.objects[object], tile, buffer)?;
                let expected = self.stored.get(&(object, tile)).cloned().unwrap_or(vec![0; 100]);
                self.readings.push((reading, expected));
            }
            Call::Wait { which } if !self.readings.is_empty() => {
                let (reading, expected) = self.readings.swap_remove(which % self.readings.len());
                let buffer = self.rig.tier.wait(reading)?;
                assert!(buffer.as_slice() == expected, "{}", self.kind.name);
            }
            Call::Cancel { which } if !self.readings.is_empty() => {
                let (reading, _) = self.readings.swap_remove(which % self.readings.len());
                self.rig.tier.cancel(reading);
            }
            Call::Hold => {
                if self.held.len() + 1 < COUNT {
                    let buffer = self.buffer();
                    self.held.extend(buffer);
                }
            }
            Call::Give { which } if !self.held.is_empty() => {
                let mut buffer = self.held.swap_remove(which % self.held.len());
                buffer.as_mut_slice().fill(0xee);
                self.rig.tier.give(buffer);
            }
            Call::Flush => self.rig.tier.flush()?,
            Call::Recreate { object } => {
                self.rig.tier.remove(self.objects[object]);
                self.objects[object] = self.rig.tier.create(&object.to_string(), TILES)?;
                self.stored.retain(|(o, _), _| *o != object);
            }
            Call::Fault(fault) => self.faults.arm(fault),
            Call::Wait { .. } | Call::Cancel { .. } | Call::Give { .. } => {}
        }
        Ok(())
    }

    fn finish(mut self) {
        for (reading, expected) in std::mem::take(&mut self.readings) {
            assert!(self.rig.tier.wait(reading).unwrap().as_slice() == expected);
        }
        self.held.clear();
        for (&(object, tile), expected) in &self.stored {
            assert!(self.rig.read(self.objects[object], tile).unwrap() == *expected);
        }
        self.rig.tier.flush().unwrap();
        // Reads that were given up may still be on their way: their buffers come back when they have ended.
        let end = Instant::now() + Duration::from_secs(10);
        while self.rig.tier.free_buffers() < COUNT && Instant::now() < end {
            drop(self.rig.tier.try_buffer().unwrap());
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(self.rig.tier.free_buffers(), COUNT);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_calls_in_any_order(calls in prop::collection::vec(call(), 1..60), seed in any::<u64>()) {
        for kind in KINDS {
            let mut model = Model::new(kind, seed);
            for call in calls.clone() {
                model.run(call).unwrap();
            }
            model.finish();
        }
    }
}
